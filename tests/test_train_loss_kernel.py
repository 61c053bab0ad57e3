"""The Triton kernels against their specification and float64; interpreted where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loss_cases import expected, make_case

from train import objective
from train.loss_rows import PLAIN, Kernels, RowLosses, SliceTeacher, row_losses
from train.objective import OutputHead, block_loss

pytest.importorskip("triton", reason="the kernels need Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Three tiles of 64 columns, the last one of them partly filled.
NUM_TOKENS = 150
# Of the gradient, relative: bfloat16 keeps 8 bits, which a GPU rounds and the interpreter cuts.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    from train import loss_kernel

    monkeypatch.setattr(loss_kernel, "_TILE", 64)
    return loss_kernel.TRITON


def on_device(teacher: SliceTeacher) -> SliceTeacher:
    tensors = (teacher.logits, teacher.ids, teacher.probabilities)
    return SliceTeacher(*(tensor if tensor is None else tensor.to(DEVICE) for tensor in tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_listed", [None, 1, 20, NUM_TOKENS])
@pytest.mark.parametrize("kl_weight", [0.0, 0.3, 1.0])
def test_losses_and_gradient_equal_the_specification_and_float64(
    kernels: Kernels, num_listed: int | None, kl_weight: float, dtype: torch.dtype
) -> None:
    case = make_case(12, NUM_TOKENS, num_listed, dtype=dtype)

    def computed(device: str, kernels: Kernels) -> RowLosses:
        teacher = case.teacher(dtype) if device == "cpu" else on_device(case.teacher(dtype))
        return row_losses(
            case.logits.to(device, dtype),
            case.labels.to(device),
            teacher,
            kl_weight,
            kernels=kernels,
            with_gradient=True,
        )

    plain, found = computed("cpu", PLAIN), computed(DEVICE, kernels)
    assert plain.gradient is not None and found.gradient is not None
    assert found.gradient.dtype == dtype, "the kernel works in the memory of the logits"
    loss, nll, gradient = expected(case, kl_weight)
    for got, specified, wanted in ((found.loss, plain.loss, loss), (found.nll, plain.nll, nll)):
        torch.testing.assert_close(got.cpu(), specified, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-5, atol=2e-5)
    assert torch.equal(found.best.cpu(), plain.best)
    for got, wanted in ((found.gradient.cpu().float(), plain.gradient), (found.gradient.cpu().double(), gradient)):
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=1e-6)


def test_equal_logits_give_the_first_as_arg_max_listed_or_not(kernels: Kernels) -> None:
    logits = torch.zeros(3, NUM_TOKENS, device=DEVICE)
    logits[:, [5, 70, 140]] = 4.0
    ids = torch.tensor([[5, 1], [70, 140], [0, 1]], device=DEVICE)
    labels = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    teacher = SliceTeacher(ids=ids, probabilities=torch.full((3, 2), 0.25, device=DEVICE))
    for given in (None, teacher):
        for way in (PLAIN, kernels):
            found = row_losses(logits.clone(), labels, given, 0.5 if given else 0.0, kernels=way, with_gradient=False)
            assert found.best.tolist() == [5, 5, 5]


def test_very_large_and_very_small_logits_do_not_overflow(kernels: Kernels) -> None:
    logits = torch.linspace(-1e4, 1e4, NUM_TOKENS).expand(2, -1).contiguous()
    labels = torch.tensor([NUM_TOKENS - 1, 0])
    found = row_losses(
        logits.to(DEVICE),
        labels.to(DEVICE),
        SliceTeacher(logits=logits.flip(1).to(DEVICE)),
        0.5,
        kernels=kernels,
        with_gradient=True,
    )
    assert found.nll.tolist() == [0.0, 2e4]
    assert found.gradient is not None and found.gradient.isfinite().all() and found.loss.isfinite().all()


def test_the_whole_loss_runs_on_the_kernel_slice_by_slice(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, 16, generator=generator)
    head = torch.randn(NUM_TOKENS, 16, generator=generator)
    labels = torch.randint(NUM_TOKENS, (5, 4), generator=generator)
    weights = torch.rand(5, 4, generator=generator) * torch.tensor([0.0, 1, 1, 1])

    def computed() -> tuple[float, torch.Tensor]:
        leaf = hidden.to(DEVICE).requires_grad_()
        output = block_loss(
            leaf,
            labels.to(DEVICE),
            weights.to(DEVICE),
            OutputHead(head.to(DEVICE)),
            streak_aware=True,
            slice_elements=4 * NUM_TOKENS,
        )
        return float(output.loss.detach()), torch.autograd.grad(output.loss, leaf)[0].cpu()

    monkeypatch.setattr(objective, "_kernels", lambda _: PLAIN)
    loss, gradient = computed()
    monkeypatch.setattr(objective, "_kernels", lambda _: kernels)
    found_loss, found_gradient = computed()
    assert found_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-4, atol=1e-5)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from train import loss_kernel
sums = {name: "*fp32" for name in ("top_of", "total_of", "scale_of", "teacher_lse_of", "gap_of")}
types = sums | {"logits": "*bf16", "teacher": "*bf16", "best_of": "*i64", "label_of": "*i64"}
types |= {"kl_weight": "fp32", "num_columns": "i32", "HAS_TEACHER": "constexpr", "TILE": "constexpr"}
for kernel in (loss_kernel._statistics_kernel, loss_kernel._gradient_kernel):
    for has_teacher in (False, True):
        source = ASTSource(
            kernel,
            {name: types[name] for name in kernel.arg_names},
            {"HAS_TEACHER": has_teacher, "TILE": loss_kernel._TILE},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        print(kernel.__name__, has_teacher, len(compiled.asm["cubin"]))
"""


def test_the_kernels_compile_to_machine_code_of_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
