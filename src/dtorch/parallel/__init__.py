"""Distributing modules: ``parallelize`` and what it decides by; ``describe`` says what it did."""

from torch.optim.optimizer import register_optimizer_step_pre_hook

from .apply import parallelize
from .description import Description, describe
from .layout import Layout
from .plan import Plan, Row
from .sources import plan_of
from .states import settle_state
from .weights import load_pretrained, save_pretrained

__all__ = [
    "Description",
    "Layout",
    "Plan",
    "Row",
    "describe",
    "load_pretrained",
    "parallelize",
    "plan_of",
    "save_pretrained",
]

# Loading an optimizer's state cannot be seen otherwise: it is a method of classes that are not ours.
register_optimizer_step_pre_hook(settle_state)
