"""Fourier transforms: whole along the transformed dims, linear in their input."""

from __future__ import annotations

from ..call import OpCall
from ..labels import Labels, PartialRow
from ..rule import Rule
from .compose import letters


def transform(call: OpCall) -> Labels:
    """Every dim that is not transformed may be split."""
    ndim = len(call.specs[0].shape)
    dims = letters(ndim, [d % ndim for d in call.arg("dim")])
    # The CPU's kernels fail on a piece without elements.
    return Labels([dims], [dims], partial=[PartialRow((True,))], nonempty=frozenset(c for c in dims if c is not None))


TABLE = {"_fft_c2c": Rule(transform), "_fft_r2c": Rule(transform), "_fft_c2r": Rule(transform)}
"""Half a spectrum is linear too: the imaginary part that a real output leaves out is left out of every summand alike."""
