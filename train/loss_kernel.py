"""Triton kernels of `train.loss_rows`: what happens to a slice of logits between the two matrix products of the head.

The products themselves stay with cuBLAS. A kernel that makes logits tile by tile inside itself would have to make them
a second time for the gradient, three products of R x V x H instead of two. With H = 5120 a logit costs 20,480 floating
point operations in two products, but only 10 bytes of traffic in a bfloat16 slice (written, read for the sums, read and
written for the gradient, read by the product): about 26 against 2 picoseconds on an H200.

Why not an existing kernel (read at Liger-Kernel ead96b61 and ml-cross-entropy d42911f): Liger's fused linear cross
entropy has the arg-max but no KL, and its fused linear JSD keeps a float32 [R, V] loss and has no top-k; cut-cross-
entropy has neither KL nor arg-max. All of them compute the gradient of the head, which is frozen here.

One pass over each row makes the sums (forward: maximum, its place, exponentials, the teacher's terms, rescaled when the
maximum grows), a second one turns logits into their gradient in place (backward). Arithmetic is float32 throughout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from train.loss_rows import Kernels, Statistics

# Columns that a program holds at a time.
_TILE = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _statistics_kernel(
    logits: tl.tensor,
    teacher: tl.tensor,
    top_of: tl.tensor,
    total_of: tl.tensor,
    best_of: tl.tensor,
    teacher_lse_of: tl.tensor,
    gap_of: tl.tensor,
    num_columns: tl.tensor,
    HAS_TEACHER: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per row; contiguous [R, V]."""
    row = tl.program_id(0).to(tl.int64)
    start = row * num_columns
    # Finite, so that a row of -inf gives exp(-inf - lowest) = 0 and not NaN.
    top = tl.full((), -3.4028234663852886e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    best = tl.full((), 0, tl.int64)
    teacher_top = top
    teacher_total = total
    gap = total
    for first in range(0, num_columns, TILE):
        columns = first + tl.arange(0, TILE)
        inside = columns < num_columns
        z = tl.load(logits + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        tile_top, tile_best = tl.max(z, axis=0, return_indices=True)
        best = tl.where(tile_top > top, (first + tile_best).to(tl.int64), best)
        new_top = tl.maximum(top, tile_top)
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(z - new_top), axis=0)
        top = new_top
        if HAS_TEACHER:
            t = tl.load(teacher + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            new_teacher_top = tl.maximum(teacher_top, tl.max(t, axis=0))
            shrink = tl.exp(teacher_top - new_teacher_top)
            p = tl.exp(t - new_teacher_top)
            teacher_total = teacher_total * shrink + tl.sum(p, axis=0)
            gap = gap * shrink + tl.sum(p * (tl.where(inside, t, 0.0) - tl.where(inside, z, 0.0)), axis=0)
            teacher_top = new_teacher_top
    tl.store(top_of + row, top)
    tl.store(total_of + row, total)
    tl.store(best_of + row, best)
    if HAS_TEACHER:
        tl.store(teacher_lse_of + row, teacher_top + tl.log(teacher_total))
        tl.store(gap_of + row, gap / teacher_total)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(
    logits: tl.tensor,
    teacher: tl.tensor,
    top_of: tl.tensor,
    scale_of: tl.tensor,
    label_of: tl.tensor,
    teacher_lse_of: tl.tensor,
    kl_weight: tl.tensor,
    num_columns: tl.tensor,
    HAS_TEACHER: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per row and tile; overwrites the logits."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < num_columns
    place = row * num_columns + columns
    z = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
    gradient = tl.exp(z - tl.load(top_of + row)) * tl.load(scale_of + row)
    if HAS_TEACHER:
        t = tl.load(teacher + place, mask=inside, other=float("-inf")).to(tl.float32)
        gradient -= kl_weight * tl.exp(t - tl.load(teacher_lse_of + row))
    gradient -= tl.where(columns == tl.load(label_of + row), 1.0 - kl_weight, 0.0)
    tl.store(logits + place, gradient.to(logits.dtype.element_ty), mask=inside)


def _statistics(logits: Tensor, teacher: Tensor | None) -> Statistics:
    """See `Kernels`; what is left are the logits as they are."""
    num_rows, num_columns = logits.shape
    assert logits.is_contiguous() and (teacher is None or teacher.is_contiguous())
    top, total, lse, gap = torch.empty(4, num_rows, dtype=torch.float32, device=logits.device).unbind()
    best = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows > 0:
        _statistics_kernel[(num_rows,)](
            logits,
            logits if teacher is None else teacher,
            top,
            total,
            best,
            lse,
            gap,
            num_columns,
            HAS_TEACHER=teacher is not None,
            TILE=_tile(num_columns),
            num_warps=8,
        )
    return Statistics(top, total, best, logits, teacher, *((lse, gap) if teacher is not None else (None, None)))


def _gradient(sums: Statistics, scale: Tensor | None, labels: Tensor, kl_weight: float) -> Tensor:
    """See `Kernels`; in place of the logits."""
    logits, teacher = sums.left, sums.teacher_left
    num_rows, num_columns = logits.shape
    if num_rows == 0:
        return logits
    tile = _tile(num_columns)
    _gradient_kernel[(num_rows, triton.cdiv(num_columns, tile))](
        logits,
        logits if teacher is None else teacher,
        sums.top,
        sums.total.reciprocal() if scale is None else scale,
        labels,
        sums.top if sums.teacher_lse is None else sums.teacher_lse,
        kl_weight,
        num_columns,
        HAS_TEACHER=teacher is not None,
        TILE=tile,
        num_warps=8,
    )
    return logits


def _tile(num_columns: int) -> int:
    return min(_TILE, int(triton.next_power_of_2(num_columns)))


TRITON = Kernels(_statistics, _gradient, float32_only=False)
