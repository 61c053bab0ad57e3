"""RMSNorm against its formula in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from train.rms_norm import RMSNorm


def in_float64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("shape", [(7, 16), (3, 4, 5, 8), (2, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_output_and_gradients_equal_those_of_the_formula(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    random = torch.Generator().manual_seed(1)
    x, probe = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
    norm = RMSNorm(shape[-1], eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1], generator=random))
    leaf = x.clone().requires_grad_()
    output = norm(leaf)
    of_x, of_weight = torch.autograd.grad(output, (leaf, norm.weight), probe)
    wide, weight = x.double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = in_float64(wide, weight, 1e-3)
    expected_x, expected_weight = torch.autograd.grad(expected, (wide, weight), probe.double())
    assert output.dtype == of_x.dtype == dtype and of_weight.dtype == torch.float32
    for found, wanted in ((output, expected), (of_x, expected_x), (of_weight, expected_weight)):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
