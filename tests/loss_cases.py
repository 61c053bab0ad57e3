"""Rows of logits with labels and teachers, and their losses by the formulas, in float64 with autograd's gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.loss_rows import SliceTeacher


@dataclass(frozen=True)
class Case:
    logits: Tensor
    """[R, V], float64 holding values of the dtype under test."""
    labels: Tensor
    teacher_logits: Tensor
    """[R, V], likewise."""
    num_listed: int | None
    """None: the teacher is whole."""

    def teacher(self, dtype: torch.dtype) -> SliceTeacher:
        if self.num_listed is None:
            return SliceTeacher(logits=self.teacher_logits.to(dtype))
        logprobs, ids = self.teacher_logits.log_softmax(1).topk(self.num_listed, dim=1)
        return SliceTeacher(ids=ids, probabilities=logprobs.exp().float())


def make_case(
    num_rows: int, num_tokens: int, num_listed: int | None, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Case:
    """Random rows; drafter and teacher are related, so that the KL is neither tiny nor huge."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(num_rows, num_tokens, generator=generator) * 2
    logits, teacher = ((shared + torch.randn(shared.shape, generator=generator)).to(dtype).double() for _ in range(2))
    return Case(logits, torch.randint(num_tokens, (num_rows,), generator=generator), teacher, num_listed)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(1)[torch.arange(len(labels)), labels]


def lumped_kl(teacher_logits: Tensor, logits: Tensor, num_listed: int | None) -> Tensor:
    """KL [R] of the teacher's distribution to the drafter's; tokens beyond the likeliest ones form one class."""
    p, q = teacher_logits.softmax(1), logits.softmax(1)
    if num_listed is None or num_listed == p.shape[1]:
        return (p * (p / q).log()).sum(1)
    listed = torch.zeros_like(p, dtype=torch.bool).scatter_(1, p.topk(num_listed, dim=1).indices, True)
    p_rest, q_rest = ((x * ~listed).sum(1) for x in (p, q))
    return (listed * p * (p / q).log()).sum(1) + p_rest * (p_rest / q_rest).log()


def expected(case: Case, kl_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [R], cross entropy [R], gradient [R, V]), float64."""
    leaf = case.logits.clone().requires_grad_()
    nll = cross_entropy(leaf, case.labels)
    loss = (1 - kl_weight) * nll + kl_weight * lumped_kl(case.teacher_logits, leaf, case.num_listed)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), nll.detach(), gradient
