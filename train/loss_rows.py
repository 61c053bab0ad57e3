"""Cross entropy and KL divergence of a slice of rows, and their gradient, from the rows' logits.

Letters: R = rows of the slice, V = tokens of the head, K = tokens that the teacher lists.

With drafter q = softmax(z), label y, teacher p and w = `kl_weight`:

    loss = (1 - w) * -log q_y  +  w * KL(p || q)
    d loss / d z_v = q_v - (1 - w) [v = y] - w p_v

A teacher that lists only its likeliest tokens S says p_v there and p_rest = 1 - sum of these for all others together.
So these others are one class on both sides, q_rest = sum of q_v over v not in S:

    KL = sum over S of p_v log(p_v / q_v)  +  p_rest log(p_rest / q_rest)
    d KL / d z_v = q_v - p_v in S,  q_v - p_rest q_v / q_rest outside

By the log-sum inequality this is at most the KL over all tokens, and equal to it when q is proportional to p outside S:
nothing is made up about the tokens that were not stored. p_v need not be renormalised, and q_rest is summed over its
tokens (not 1 minus the others, which cancels when the drafter is sure).

Everything of size R x V happens in the two functions of `Kernels`. Those here, in PyTorch, are the specification;
`train.loss_kernel` has the same two in Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_LOWEST = torch.finfo(torch.float32).min
_PART = 512


@dataclass(frozen=True)
class SliceTeacher:
    """The teacher's distribution in each row: `logits`, or `ids` and `probabilities`."""

    logits: Tensor | None = None
    """[R, V], used up by `row_losses`."""
    ids: Tensor | None = None
    """int64 [R, K], each at most once in a row."""
    probabilities: Tensor | None = None
    """float32 [R, K]."""

    def part(self, rows: slice) -> SliceTeacher:
        """The same for some of the rows."""
        of_rows = [None if whole is None else whole[rows] for whole in (self.logits, self.ids, self.probabilities)]
        return SliceTeacher(*of_rows)


@dataclass(frozen=True)
class RowLosses:
    """Result of `row_losses`; the tensors [R] are float32, `best` int64."""

    loss: Tensor
    """(1 - kl_weight) * cross entropy + kl_weight * KL."""
    nll: Tensor
    """Cross entropy: minus the log-probability of the label."""
    best: Tensor
    """Arg-max of the logits."""
    gradient: Tensor | None
    """[R, V] d loss / d logits, in the memory of the logits."""


@dataclass(frozen=True)
class Statistics:
    """Sums over the logits z of each row, and over the teacher's t if it has any; float32 [R], `best` int64."""

    top: Tensor
    """max z; the lowest float32 where every z is -inf."""
    total: Tensor
    """sum of exp(z - top)."""
    best: Tensor
    left: Tensor
    """[R, V] what the gradient will be made from, in the memory of the logits."""
    teacher_left: Tensor | None = None
    """The same of the teacher's logits."""
    teacher_lse: Tensor | None = None
    """log sum exp t."""
    gap: Tensor | None = None
    """sum of softmax(t) * (t - z)."""


@dataclass(frozen=True)
class Kernels:
    """One way to compute what is of size R x V."""

    statistics: Callable[[Tensor, Tensor | None], Statistics]
    """(logits, teacher's logits) [R, V] -> sums."""
    gradient: Callable[[Statistics, Tensor | None, Tensor, float], Tensor]
    """(sums, scale [R], labels [R], kl_weight) -> [R, V]: exp(z - top) * scale - (1 - kl_weight) [v = label] -
    kl_weight * softmax(t), in place of `left`. No scale: 1 / total, so that it starts from softmax(z)."""
    float32_only: bool
    """Logits of both must be float32."""


def row_losses(
    logits: Tensor,
    labels: Tensor,
    teacher: SliceTeacher | None,
    kl_weight: float,
    *,
    kernels: Kernels,
    with_gradient: bool,
) -> RowLosses:
    """Losses of rows: logits [R, V] (used up), labels int64 [R]; without a teacher `kl_weight` must be 0."""
    assert teacher is not None or kl_weight == 0
    full = teacher.logits if teacher is not None else None
    if kernels.float32_only:
        logits, full = logits.float(), full.float() if full is not None else None
    label_logits = logits.gather(1, labels[:, None]).squeeze(1).float()
    listed = _Listed.take(logits, teacher) if teacher is not None and teacher.ids is not None else None
    sums = kernels.statistics(logits, full)
    unlisted_lse = sums.top + sums.total.log()  # of all tokens when none is listed
    if listed is None:
        lse, best, scale = unlisted_lse, sums.best, None
    else:
        lse, best = torch.logaddexp(unlisted_lse, listed.logits.logsumexp(1)), listed.best(sums)
        share = torch.where(sums.total > 0, listed.rest / sums.total, 0.0)
        scale = (sums.top - lse).exp() - kl_weight * share
    nll = lse - label_logits
    loss = nll
    if listed is not None:
        loss = nll.lerp(listed.kl(lse, unlisted_lse), kl_weight)
    elif sums.gap is not None and sums.teacher_lse is not None:
        loss = nll.lerp(sums.gap - sums.teacher_lse + lse, kl_weight)
    if not with_gradient:
        return RowLosses(loss, nll, best, None)
    gradient = kernels.gradient(sums, scale, labels, kl_weight)
    if listed is not None:
        listed.put_gradient(gradient, lse, labels, kl_weight)
    return RowLosses(loss, nll, best, gradient)


@dataclass(frozen=True)
class _Listed:
    """The teacher's listed tokens, taken out of the drafter's logits: what stays there are the others."""

    ids: Tensor
    """int64 [R, K]."""
    probabilities: Tensor
    """float32 [R, K], the teacher's."""
    rest: Tensor
    """float32 [R], the teacher's probability of all other tokens."""
    logits: Tensor
    """float32 [R, K], the drafter's."""

    @classmethod
    def take(cls, logits: Tensor, teacher: SliceTeacher) -> _Listed:
        assert teacher.ids is not None and teacher.probabilities is not None
        taken = logits.gather(1, teacher.ids).float()
        logits.scatter_(1, teacher.ids, float("-inf"))
        rest = (1 - teacher.probabilities.sum(dim=1)).clamp_min(0)
        return cls(teacher.ids, teacher.probabilities, rest, taken)

    def best(self, others: Statistics) -> Tensor:
        """Arg-max over all tokens; of equal ones the first."""
        top = self.logits.max(dim=1).values
        own = self.ids.masked_fill(self.logits < top[:, None], torch.iinfo(torch.int64).max).min(dim=1).values
        wins = (top > others.top) | ((top == others.top) & (own < others.best))
        return torch.where(wins, own, others.best)

    def kl(self, lse: Tensor, unlisted_lse: Tensor) -> Tensor:
        """float32 [R]; a rest without tokens (all are listed) has no mass but what rounding left."""
        p, rest = self.probabilities, self.rest
        inside: Tensor = torch.special.xlogy(p, p) - p * (self.logits - lse[:, None])
        outside: Tensor = torch.special.xlogy(rest, rest) - rest * (unlisted_lse - lse)
        return inside.sum(dim=1) + torch.where((rest > 0) & unlisted_lse.isfinite(), outside, 0.0)

    def put_gradient(self, gradient: Tensor, lse: Tensor, labels: Tensor, kl_weight: float) -> None:
        """Writes d loss / d logits of the listed tokens to their places."""
        own = (self.logits - lse[:, None]).exp() - kl_weight * self.probabilities
        own -= (1 - kl_weight) * (self.ids == labels[:, None])
        gradient.scatter_(1, self.ids, own.to(gradient.dtype))


def _statistics(logits: Tensor, teacher: Tensor | None) -> Statistics:
    """See `Kernels`; what is left are the probabilities."""
    lse = gap = taught = None
    if teacher is not None:
        difference = teacher - logits
        teacher_top, teacher_total, _, taught = _softmax(teacher)
        lse = teacher_top + teacher_total.log()
        gap = difference.mul_(taught).sum(dim=1)
        del difference
    top, total, best, own = _softmax(logits)
    return Statistics(top, total, best, own, taught, lse, gap)


def _gradient(sums: Statistics, scale: Tensor | None, labels: Tensor, kl_weight: float) -> Tensor:
    """See `Kernels`, and `_statistics` for what it left."""
    gradient = sums.left
    if scale is not None:
        gradient.mul_((scale * sums.total)[:, None])
    if sums.teacher_left is not None:
        gradient.sub_(sums.teacher_left, alpha=kl_weight)
    gradient[torch.arange(len(labels), device=labels.device), labels] -= 1 - kl_weight
    return gradient


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[R, V] -> max [R], sum of exponentials relative to it [R], where it is [R]; and probabilities in its place.

    One pass makes the probabilities, and that of the largest is all it takes to know the sum. A row of -inf has none:
    its sum and its probabilities are 0.
    """
    top, best = _first_largest(logits)
    probabilities = torch.softmax(logits, dim=1, out=logits)
    total = probabilities.gather(1, best).reciprocal_()
    if (empty := top == float("-inf")).any():
        probabilities.masked_fill_(empty, 0.0)
        total.masked_fill_(empty, 0.0)
    return top.clamp_min(_LOWEST).squeeze(1), total.squeeze(1), best.squeeze(1), probabilities


def _first_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row and its first place, [R, 1] each.

    On CPUs `max` with places takes three times as long as `amax` without: so first the largest part of the row, then
    the place in that part.
    """
    whole = logits.shape[1] // _PART * _PART
    parts = logits[:, :whole].view(len(logits), whole // _PART, _PART).amax(dim=2)
    if whole < logits.shape[1]:
        parts = torch.cat([parts, logits[:, whole:].amax(dim=1, keepdim=True)], dim=1)
    first = parts.argmax(dim=1, keepdim=True) * _PART
    columns = (first + torch.arange(min(_PART, logits.shape[1]), device=logits.device)).clamp_max(logits.shape[1] - 1)
    part = logits.gather(1, columns)
    place = part.argmax(dim=1, keepdim=True)
    return part.gather(1, place), first + place


PLAIN = Kernels(_statistics, _gradient, float32_only=True)
