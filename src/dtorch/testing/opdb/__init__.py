"""PyTorch's operator database against dtorch: every operator, sample and placement, plain PyTorch being the oracle.

``python -m dtorch.testing.opdb --help`` says how to run it.
"""
