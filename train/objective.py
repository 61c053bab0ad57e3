"""The loss of block slots over a frozen output head, in slices: all logits never exist at once.

Letters: A = anchors, B = block size, H = hidden size, R = rows with loss (at most A * B), V = tokens of the
head. What the loss of a row is: `train.loss_rows`.

Because the head is frozen, the gradient of the loss with respect to a row of hidden states is known as soon
as the row's logits are: the forward pass makes both, slice by slice, and backward only scales what was kept.
So logits are computed once and nothing of size R x V is ever stored. Rows are weighted after that, by ordinary
autograd, so a row's weight may depend on what the drafter said.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from train.anchors import streak_weights
from train.loss_rows import PLAIN, Kernels, row_losses
from train.teacher import BlockTeacher

# Elements of one slice of logits: small enough not to matter for memory, large enough for the matrix products.
_SLICE_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
# Elements of a tile of a slice: what is done to each logit is done tile by tile, so that a tile stays in the CPU's
# cache from one pass to the next.
_TILE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 28}


@dataclass(frozen=True)
class OutputHead:
    """The target's frozen output head, whole or restricted to some tokens. Its dtype is the logits'."""

    weight: Tensor
    """[V, H]; row i belongs to token `vocab_ids[i]`, or to token i of the whole vocabulary."""
    index_of: Tensor | None = None
    """int64 [whole vocabulary]; row of each token in `weight`, -1 where left out. None: the head is whole."""

    @classmethod
    def restricted(cls, weight: Tensor, vocab_ids: Tensor) -> OutputHead:
        """The head over the distinct tokens `vocab_ids` (int64) of the whole `weight`."""
        index_of = torch.full((weight.shape[0],), -1, dtype=torch.int64, device=weight.device)
        index_of[vocab_ids] = torch.arange(vocab_ids.shape[0], device=weight.device)
        return cls(weight=weight[vocab_ids].contiguous(), index_of=index_of)

    def rows_of(self, labels: Tensor) -> Tensor:
        """Rows of the head for token ids, -1 where a token is left out."""
        return labels if self.index_of is None else self.index_of[labels]


@dataclass(frozen=True)
class BlockSums:
    """Numerators and denominators of all metrics; `+` over packs and `vector` for sums over ranks.

    Tokens that a restricted head leaves out count as wrong, and end a block's accepted prefix, but carry no
    loss.
    """

    loss: Tensor
    """float64, sum of weight * loss of a slot."""
    weight: Tensor
    """float64, sum of weights: the denominator of the loss."""
    accepted: Tensor
    """float64, sum over blocks of the leading slots (from slot 1) that are all predicted right."""
    blocks: Tensor
    """float64, blocks with a valid slot 1."""
    left_out: Tensor
    """float64, valid slots whose label the head leaves out."""
    correct_at: Tensor
    """float64 [B], valid slots predicted right, per slot."""
    valid_at: Tensor
    """float64 [B], valid slots, per slot."""

    def vector(self) -> Tensor:
        """All sums as one float64 vector [5 + 2 B]."""
        scalars = (self.loss, self.weight, self.accepted, self.blocks, self.left_out)
        return torch.cat([torch.stack(scalars), self.correct_at, self.valid_at])

    @classmethod
    def from_vector(cls, vector: Tensor) -> BlockSums:
        loss, weight, accepted, blocks, left_out = vector[:5].unbind()
        correct_at, valid_at = vector[5:].chunk(2)
        return cls(loss, weight, accepted, blocks, left_out, correct_at, valid_at)

    @classmethod
    def zero(cls, block_size: int, device: torch.device | str = "cpu") -> BlockSums:
        return cls.from_vector(torch.zeros(5 + 2 * block_size, dtype=torch.float64, device=device))

    def __add__(self, other: BlockSums) -> BlockSums:
        return BlockSums.from_vector(self.vector() + other.vector())

    @property
    def mean_loss(self) -> float:
        return _ratio(self.loss, self.weight)

    @property
    def accuracy(self) -> float:
        """Share of valid slots predicted right."""
        return _ratio(self.correct_at.sum(), self.valid_at.sum())

    @property
    def streak(self) -> float:
        """Mean acceptance length in tokens: accepted prefix + 1 for the bonus token."""
        return 1.0 + _ratio(self.accepted, self.blocks)

    @property
    def accuracy_at(self) -> list[float]:
        """Accuracy per slot 1..B-1, whether or not the slots before were right."""
        pairs = zip(self.correct_at[1:], self.valid_at[1:], strict=True)
        return [_ratio(correct, valid) for correct, valid in pairs]


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    return float(numerator / denominator) if denominator > 0 else 0.0


@dataclass(frozen=True)
class LossOutput:
    """Result of `block_loss`."""

    loss: Tensor
    """float32 sum of weight * loss of a slot, differentiable; divide it by the weights of the whole step."""
    sums: BlockSums
    """Detached sums for metrics."""
    weights: Tensor
    """float32 [A, B], what each slot weighs; 0 where it carries no loss. Their sum is `sums.weight`."""
    nll: Tensor
    """float32 [A, B] cross entropy; 0 where a slot carries no loss."""
    label_probability: Tensor
    """float32 [A, B] the drafter's probability of the label; 0 where a slot carries no loss."""
    correct: Tensor
    """bool [A, B]; arg-max equals the label, at slots that carry loss."""


def block_loss(
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    head: OutputHead,
    *,
    teacher: BlockTeacher | None = None,
    kl_weight: float = 0.0,
    streak_aware: bool = False,
    slice_elements: int | None = None,
) -> LossOutput:
    """Weighted loss of blocks: hidden [A, B, H], labels int64 [A, B], weights float [A, B].

    A slot's loss is cross entropy, KL to the teacher, or a mixture: (1 - kl_weight) * CE + kl_weight * KL. With a
    restricted head both distributions are those among its tokens. With `streak_aware` the weights are multiplied by
    those of D-PACE (`streak_weights`), from the probabilities of the labels in this very pass.

    A slot with weight 0 is invalid: no loss, no logits, and it ends its block's accepted prefix.
    `slice_elements` limits the logits that exist at a time (default by device).
    """
    valid = weights > 0
    head_rows = head.rows_of(labels)
    scored = valid & (head_rows >= 0)
    index = scored.flatten().nonzero().squeeze(1)  # [R]
    vocab_size = head.weight.shape[0]
    slice_elements = slice_elements or _of_device(_SLICE_ELEMENTS, hidden.device)
    tile_elements = min(slice_elements, _of_device(_TILE_ELEMENTS, hidden.device))
    loss_of, nll, best = _SlicedLoss.apply(  # type: ignore[no-untyped-call]  # torch has no types here
        hidden.flatten(0, 1)[index],
        head.weight,
        head_rows.flatten()[index],
        teacher.select(index) if teacher is not None and kl_weight > 0 else None,
        kl_weight,
        max(1, slice_elements // vocab_size),
        max(1, tile_elements // vocab_size),
        torch.is_grad_enabled() and hidden.requires_grad,
        _kernels(hidden.device),
    )
    probability = _scatter(torch.exp(-nll), index, valid.shape)
    correct = _scatter(best == head_rows.flatten()[index], index, valid.shape)
    if streak_aware:
        weights = weights * streak_weights(probability, valid)
    row_weights = weights.flatten()[index].float()
    loss = (loss_of * row_weights).sum()
    sums = BlockSums(
        loss=loss.detach().double(),
        weight=row_weights.sum(dtype=torch.float64),
        accepted=correct[:, 1:].cumprod(dim=1).sum(dtype=torch.float64),
        blocks=valid[:, 1].sum(dtype=torch.float64),
        left_out=(valid & ~scored).sum(dtype=torch.float64),
        correct_at=correct.sum(dim=0, dtype=torch.float64),
        valid_at=valid.sum(dim=0, dtype=torch.float64),
    )
    return LossOutput(
        loss=loss,
        sums=sums,
        weights=_scatter(row_weights, index, valid.shape),
        nll=_scatter(nll, index, valid.shape),
        label_probability=probability,
        correct=correct,
    )


def _of_device(sizes: dict[str, int], device: torch.device) -> int:
    return sizes.get(device.type, sizes["cpu"])


def _kernels(device: torch.device) -> Kernels:
    """Triton's on a GPU, else PyTorch's."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from train.loss_kernel import TRITON

        return TRITON
    return PLAIN


def _scatter(values: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Values [R] at flat positions `index` of zeros of `shape`."""
    full = values.new_zeros(shape.numel())
    full[index] = values
    return full.view(shape)


class _SlicedLoss(torch.autograd.Function):
    """hidden [R, H], weight [V, H], labels [R], teacher of R rows -> loss [R], cross entropy [R], arg-max [R].

    Only the loss has a gradient, and only with respect to `hidden`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        teacher: BlockTeacher | None,
        kl_weight: float,
        rows_per_slice: int,
        rows_per_tile: int,
        needs_gradient: bool,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows = hidden.shape[0]
        loss, nll = torch.empty(2, num_rows, dtype=torch.float32, device=hidden.device).unbind()
        best = torch.empty(num_rows, dtype=torch.int64, device=hidden.device)
        gradient = torch.empty_like(hidden) if needs_gradient else None
        # One piece of memory for all slices: a fresh one of this size costs the CPU a page fault every 4 KB.
        buffer = weight.new_empty(min(rows_per_slice, num_rows), weight.shape[0])
        wide = None
        if kernels.float32_only and weight.dtype != torch.float32:
            wide = weight.new_empty(min(rows_per_tile, num_rows), weight.shape[0], dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, num_rows, rows_per_slice):
                rows = slice(first, min(first + rows_per_slice, num_rows))
                logits = torch.mm(hidden[rows].to(weight.dtype), weight.T, out=buffer[: rows.stop - first])
                taught = teacher.of_slice(rows, weight) if teacher is not None else None
                for start in range(0, len(logits), rows_per_tile):
                    inside = slice(start, min(start + rows_per_tile, len(logits)))
                    own = slice(first + start, first + inside.stop)
                    tile = logits[inside]
                    losses = row_losses(
                        tile if wide is None else wide[: len(tile)].copy_(tile),
                        labels[own],
                        taught.part(inside) if taught is not None else None,
                        kl_weight,
                        kernels=kernels,
                        with_gradient=needs_gradient,
                    )
                    loss[own], nll[own], best[own] = losses.loss, losses.nll, losses.best
                    if losses.gradient is not None:
                        tile.copy_(losses.gradient)  # nothing to do where it was made in place
                if gradient is not None:
                    gradient[rows] = logits @ weight
                del taught  # or its logits would live on beside those of the next slice
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.rows_per_slice = rows_per_slice
        ctx.mark_non_differentiable(nll, best)
        return loss, nll, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        scaled = torch.empty_like(gradient)
        for first in range(0, len(gradient), ctx.rows_per_slice):  # a product in float32 of all rows would be large
            rows = slice(first, first + ctx.rows_per_slice)
            scaled[rows] = gradient[rows].float() * grads[0][rows, None]
        return scaled, None, None, None, None, None, None, None, None
