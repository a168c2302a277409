"""Collectives: the only part of dtorch that may use ``torch.distributed``."""
