"""RMSNorm with a backward pass by hand: it keeps its input and a number a row, where autograd would keep four copies.

With n = x / sqrt(mean(x^2) + eps), y = n * w and g = d loss / d y:

    d loss / d w = sum over rows of g * n
    d loss / d x = (g * w - n * mean(g * w * n)) / sqrt(mean(x^2) + eps)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Plain RMSNorm over the last axis (weight, not 1 + weight), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]  # torch has no types here
        return normed


class _Norm(torch.autograd.Function):
    """x [..., H], weight [H] -> [..., H] in the type of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(torch.linalg.vecdot(wide, wide)[..., None] / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide = grads[0].float()
        normed = x.float() * scale
        product = wide * normed
        of_weight = product.flatten(0, -2).sum(dim=0).to(weight.dtype)
        mean = product.mul_(weight).mean(dim=-1, keepdim=True)
        of_x = (wide * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return of_x.to(x.dtype), of_weight, None
