"""SmolLM2 writing 64 tokens greedily: the cache grows, so that every step has shapes of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

import dtorch

from . import smollm2
from .figure import Figure
from .setting import Setting
from .timing import Pairs, paired

TOKENS = 64
FIRST_PROMPT = 32

Mode = Callable[[], AbstractContextManager]


def figures(setting: Setting) -> Iterator[Figure]:
    """Total time of ``generate`` on a mesh of one device, to eager."""
    decoding = Decoding(setting)
    decoding.warm_up()
    new = decoding.measure(torch.inference_mode, setting.times(3, 1), fresh=True)
    known = decoding.measure(torch.inference_mode, setting.times(2, 1), fresh=False)
    no_grad = decoding.measure(torch.no_grad, setting.times(2, 1), fresh=True)
    yield Figure(
        name="decode.one_device",
        title=f"SmolLM2, {decoding.tokens} tokens greedy, one-device mesh, total time to eager",
        measured=new.ratio,
        limit=1.3,
        spread=new.spread,
        peer="28 ms against 25 us for an attention step with a growing cache (torch DTensor)",
        notes=(
            f"{new.times(1, 's')} under inference_mode; processor time {new.cpu_ratio:.2f}x; tokens identical",
            f"each run has a prompt of another length, so that all its shapes are new: {decoding.plans:.0f} plans a run",
            f"shapes seen before: {known.ratio:.2f}x; under no_grad, shapes new: {no_grad.ratio:.2f}x",
        ),
    )


class Decoding:
    """Runs of ``generate`` on both sides, with prompts of growing length."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.tokens = setting.times(TOKENS, 8)
        self.length = FIRST_PROMPT
        self.models = smollm2.plain(setting.device), smollm2.distributed(setting.mesh())
        self.plans = 0.0

    def warm_up(self) -> None:
        """A few tokens on each side: what does not depend on the length is planned."""
        for model in self.models:
            self.generate(model, tokens=4)

    def generate(self, model: torch.nn.Module, tokens: int) -> torch.Tensor:
        """Token ids ``(1, prompt + tokens)``, read back."""
        ids = smollm2.prompt(self.length, self.setting.device)
        out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return out.to_torch() if isinstance(out, dtorch.Tensor) else out

    def measure(self, mode: Mode, pairs: int, fresh: bool) -> Pairs:
        """Time both sides in turn; with ``fresh`` each pair has a prompt so long that none of its shapes was there before."""
        runs = []
        for _ in range(pairs):
            if fresh:
                self.length += self.tokens + 1
            runs.append(self._pair(mode))
        return Pairs(base=[r.base[0] for r in runs], other=[r.other[0] for r in runs])

    def _pair(self, mode: Mode) -> Pairs:
        results: list[torch.Tensor] = []

        def side(model: torch.nn.Module) -> Callable[[], None]:
            return lambda: results.append(self.generate(model, self.tokens))

        before = dtorch.session().planned
        with mode():
            pair = paired(side(self.models[0]), side(self.models[1]), 1)
        self.plans = max(self.plans, dtorch.session().planned - before)
        assert torch.equal(results[0].cpu(), results[1].cpu()), "the tokens differ"
        return pair
