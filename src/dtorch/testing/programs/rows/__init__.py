"""Kinds of statements: each file has a table of weights and functions that draw one."""

from . import autograd, creation, indexing, joining, pointwise, products, ranking, reductions, views, writes

ROWS = (
    *views.ROWS,
    *pointwise.ROWS,
    *reductions.ROWS,
    *products.ROWS,
    *joining.ROWS,
    *indexing.ROWS,
    *ranking.ROWS,
    *creation.ROWS,
    *writes.ROWS,
    *autograd.ROWS,
)
