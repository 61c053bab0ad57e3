"""How many proposed tokens were accepted: the counts of one answer, and what is reported about many."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(kw_only=True)
class Acceptance:
    """Counts of one answer, over its steps. A step drafts a block and verifies it."""

    acceptance_lengths: list[int] = field(default_factory=list)
    """Tokens gained per step: accepted ones and the bonus token, cut at the end of the answer."""
    proposed_at: list[int] = field(default_factory=list)
    """Steps that proposed a token in slot k (index k - 1)."""
    reached_at: list[int] = field(default_factory=list)
    """Of these, steps in which all slots before k were accepted."""
    accepted_at: list[int] = field(default_factory=list)
    """Of these, steps that accepted slot k too. Over `proposed_at`: acceptance; over `reached_at`: conditional."""

    @classmethod
    def of_block_size(cls, block_size: int) -> Self:
        """No step yet, for blocks that propose block_size - 1 tokens."""
        slots = block_size - 1
        return cls(proposed_at=[0] * slots, reached_at=[0] * slots, accepted_at=[0] * slots)

    def count(self, *, num_drafts: int, num_accepted: int, num_gained: int) -> None:
        """Records a step. `num_drafts` leaves out slots past the answer's end: nobody asked for them."""
        self.acceptance_lengths.append(num_gained)
        for slot in range(num_drafts):
            self.proposed_at[slot] += 1
            self.reached_at[slot] += slot <= num_accepted
            self.accepted_at[slot] += slot < num_accepted


def acceptance_report(answers: Sequence[Acceptance], block_size: int) -> dict[str, Any]:
    """Acceptance lengths are tokens per step, the bonus token included: `acceptance_length` is the mean over answers
    of each answer's mean, `acceptance_length_pooled` the mean over all steps. `by_position` has, for slot k = 1..,
    the share of proposals accepted (`accepted`) and the share among those whose earlier slots were all accepted
    (`conditional`). What no step tells is None.
    """
    steps = [length for answer in answers for length in answer.acceptance_lengths]
    means = [sum(a.acceptance_lengths) / len(a.acceptance_lengths) for a in answers if a.acceptance_lengths]
    proposed, reached, accepted = (
        [sum(getattr(answer, name)[slot] for answer in answers) for slot in range(block_size - 1)]
        for name in ("proposed_at", "reached_at", "accepted_at")
    )
    return {
        "acceptance_length": _mean(means),
        "acceptance_length_pooled": _mean(steps),
        "by_position": [
            {"accepted": a / p if p else None, "conditional": a / r if r else None}
            for p, r, a in zip(proposed, reached, accepted, strict=True)
        ],
    }


def answer_rows(answers: Sequence[Acceptance]) -> list[dict[str, int]]:
    """For JSON, of each answer: its steps, and the tokens gained in them, which are all but its first one. Their ratio
    is the answer's acceptance length."""
    return [
        {"num_steps": len(answer.acceptance_lengths), "num_gained": sum(answer.acceptance_lengths)}
        for answer in answers
    ]


def acceptance_lines(report: Mapping[str, Any]) -> list[str]:
    """Three lines for a person, of a report that holds what `acceptance_report` gives."""
    return [
        f"acceptance length  {shown_length(report['acceptance_length'])} (mean over answers), "
        f"{shown_length(report['acceptance_length_pooled'])} (pooled), bonus token included",
        "accepted at slot   " + _by_slot(report, "accepted"),
        "if all before were " + _by_slot(report, "conditional"),
    ]


def shown_length(length: float | None) -> str:
    """An acceptance length as text; None is a dash."""
    return "-" if length is None else f"{length:.3f}"


def _by_slot(report: Mapping[str, Any], name: str) -> str:
    """Up to the first slot that was never reached."""
    shares = itertools.takewhile(lambda share: share is not None, (slot[name] for slot in report["by_position"]))
    return "  ".join(f"{k}: {share:.0%}" for k, share in enumerate(shares, start=1)) or "-"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
