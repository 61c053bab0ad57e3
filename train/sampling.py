"""Choosing tokens: greedily, or from tempered distributions with lossless rejection of drafts.

Letters: n = drafted tokens, V = vocabulary, p = the target's distribution, q = the drafter's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drafts:
    """Proposed tokens, and what they were drawn from."""

    tokens: Tensor
    """int64 [n]."""
    probabilities: Tensor | None = None
    """float32 [n, V]; None when the tokens are arg-maxima."""

    def first(self, count: int) -> Drafts:
        """The first `count` of them."""
        return Drafts(self.tokens[:count], None if self.probabilities is None else self.probabilities[:count])


class Chooser(Protocol):
    """Turns logits into tokens, for plain and for speculative decoding."""

    def pick(self, logits: Tensor) -> int:
        """The target's token for logits [V]."""

    def draft(self, logits: Tensor) -> Drafts:
        """The drafter's tokens for logits [n, V], every slot by itself."""

    def verify(self, logits: Tensor, drafts: Drafts) -> tuple[int, int]:
        """How many leading drafts stay, and the target's own token behind them. Its logits are [n + 1, V]."""


class Greedy:
    """Always the likeliest token: speculative decoding repeats plain decoding token for token."""

    def pick(self, logits: Tensor) -> int:
        return int(logits.argmax())

    def draft(self, logits: Tensor) -> Drafts:
        return Drafts(logits.argmax(-1))

    def verify(self, logits: Tensor, drafts: Drafts) -> tuple[int, int]:
        choices = logits.argmax(-1)
        num_accepted = int((choices[:-1] == drafts.tokens).long().cumprod(0).sum())
        return num_accepted, int(choices[num_accepted])


class Sampling:
    """Tokens drawn at a temperature; whatever the drafter, answers are distributed as the target's own.

    Drafts are drawn from the drafter's distribution at the same temperature (speculative sampling, arXiv 2211.17192,
    algorithm 1). Slots of a block are drawn independently of each other, which is allowed: each draft is compared
    with the distribution that it was drawn from. Equal seeds repeat an answer on the same device.
    """

    def __init__(self, temperature: float, *, seed: int, device: torch.device | str = "cpu") -> None:
        assert temperature > 0, "temperature 0 is Greedy"
        self._temperature = temperature
        self._generator = torch.Generator(device).manual_seed(seed)

    def pick(self, logits: Tensor) -> int:
        return int(self._draw(self._probabilities(logits)))

    def draft(self, logits: Tensor) -> Drafts:
        probabilities = self._probabilities(logits)
        return Drafts(self._draw(probabilities).squeeze(-1), probabilities)

    def verify(self, logits: Tensor, drafts: Drafts) -> tuple[int, int]:
        assert drafts.probabilities is not None
        p, q = self._probabilities(logits), drafts.probabilities
        num_drafts = drafts.tokens.shape[0]
        chance = acceptance(p[:-1], q).gather(1, drafts.tokens[:, None]).squeeze(1)
        uniform = torch.rand(num_drafts, generator=self._generator, device=p.device)
        num_accepted = int((uniform < chance).long().cumprod(0).sum())
        rest = p[-1] if num_accepted == num_drafts else residual(p[num_accepted], q[num_accepted])
        return num_accepted, int(self._draw(rest))

    def _probabilities(self, logits: Tensor) -> Tensor:
        return (logits.float() / self._temperature).softmax(-1)

    def _draw(self, probabilities: Tensor) -> Tensor:
        """One token for each distribution [..., V]: int64 [..., 1]."""
        return torch.multinomial(probabilities, 1, generator=self._generator)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q): the chance that a token drawn from q stays. 1 where q is 0, which is never drawn."""
    return torch.where(q > 0, p / q, 1.0).clamp(max=1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)) [V]: what to draw from once a token drawn from q was refused.

    With q = p nothing is refused, except by rounding; then p stands in.
    """
    left = (p - q).clamp(min=0.0)
    total = left.sum()
    return torch.where(total > 0, left / total, p)
