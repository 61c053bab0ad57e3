"""The CUDA path of training against the CPU's. Run with `pytest -m gpu` on a machine that has a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_train_attention import Inputs, dense_float64, random_inputs, visible_cell_by_cell
from test_train_loop import LENGTHS, losses, run, settings

from cache_tools.synthetic import make_store
from train.attention import BlockLayout, attend
from train.batches import TeacherRows
from train.objective import OutputHead, block_loss
from train.target_parts import FinalNorm
from train.teacher import BlockTeacher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ANCHORS, CU_SEQLENS, BLOCK_SIZE = [3, 40, 130, 150, 290], [0, 100, 160, 300], 8


def leaves(inputs: Inputs, dtype: torch.dtype, device: str) -> Inputs:
    query, context_key, context_value, block_key, block_value = (
        x.to(device=device, dtype=dtype).requires_grad_() for x in inputs
    )
    return query, context_key, context_value, block_key, block_value


@pytest.mark.parametrize("window", [None, 32])
def test_flex_attention_and_its_gradients_equal_dense_attention(window: int | None) -> None:
    inputs = random_inputs(CU_SEQLENS[-1], len(ANCHORS), BLOCK_SIZE, seed=0)
    dense = leaves(inputs, torch.float64, "cpu")
    cells = visible_cell_by_cell(ANCHORS, CU_SEQLENS, BLOCK_SIZE, window)
    expected = dense_float64(dense, cells)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected_gradients = torch.autograd.grad(expected, dense, upstream.double())
    on_gpu = leaves(inputs, torch.float32, "cuda")
    layout = BlockLayout(torch.tensor(ANCHORS, device="cuda"), torch.tensor(CU_SEQLENS, device="cuda"), BLOCK_SIZE)
    got = attend(*on_gpu, layout, window)
    torch.testing.assert_close(got.cpu().double(), expected, atol=2e-3, rtol=2e-3)
    gradients = torch.autograd.grad(got, on_gpu, upstream.cuda())
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.cpu().double(), reference, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("teacher", ["none", "hidden", "topk"])
@pytest.mark.parametrize("streak_aware", [False, True])
def test_loss_and_gradient_equal_those_of_the_cpu(teacher: str, streak_aware: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, 32, generator=generator)
    head = torch.randn(500, 32, generator=generator)
    labels = torch.randint(0, 500, (6, 8), generator=generator)
    weights = torch.rand(6, 8, generator=generator)
    says = torch.randn(48, 32, generator=generator)
    top = (says @ head.T).log_softmax(-1).topk(20)
    rows = TeacherRows(None, top.indices.int(), top.values) if teacher == "topk" else TeacherRows(says)
    results = []
    for device in ("cpu", "cuda"):
        leaf = hidden.to(device).requires_grad_()
        output = block_loss(
            leaf,
            labels.to(device),
            weights.to(device),
            OutputHead(head.to(device)),
            teacher=BlockTeacher(
                rows.to(torch.device(device)),
                torch.arange(48, device=device).view(6, 8),
                FinalNorm(torch.ones(32, device=device), 1e-6, adds_one=False),
            ),
            kl_weight=0.0 if teacher == "none" else 0.7,
            streak_aware=streak_aware,
        )
        (gradient,) = torch.autograd.grad(output.loss, leaf)
        results.append((float(output.loss.detach()), gradient.cpu()))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-3)
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-3, rtol=1e-3)


def test_training_on_a_gpu_follows_the_curve_of_the_cpu(tmp_path: Path) -> None:
    make_store(tmp_path / "s.zarr", LENGTHS)
    for device in ("cpu", "cuda"):
        run(settings(tmp_path / "s.zarr", tmp_path / device, device=device))
    for (_, cpu, _), (_, cuda, _) in zip(losses(tmp_path / "cpu"), losses(tmp_path / "cuda"), strict=True):
        assert cuda == pytest.approx(cpu, rel=2e-2)
