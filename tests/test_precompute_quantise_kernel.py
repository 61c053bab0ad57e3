"""The Triton kernels against the numpy reference: byte for byte in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cache_tools.codecs import float32_to_bf16_bits
from cache_tools.quantise import GROUP_SIZE, QUANTISED, encode

pytest.importorskip("triton", reason="the kernels need Triton")

from precompute import quantise_kernel
from precompute.quantise import empty_parts, quantise

codecs = pytest.mark.parametrize("codec", QUANTISED)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def wild_states(num_rows: int, hidden_size: int, seed: int) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Bits [num_rows, hidden_size] over the whole range of bfloat16, with rows of zeros, and channel scales."""
    rng = np.random.default_rng(seed)
    channel_scale = np.exp(rng.normal(0, 3, hidden_size)).astype(np.float32)
    sizes = channel_scale * np.exp(rng.normal(0, 20, (num_rows, 1)))
    values = np.clip(rng.normal(size=(num_rows, hidden_size)) * sizes, -3e38, 3e38)
    bits = float32_to_bf16_bits(values.astype(np.float32))
    bits[::5] = 0
    bits[1, ::2] = 0x8000
    bits[2, 3] = 0x7F7F
    bits[3, :] = np.arange(hidden_size)
    return bits, channel_scale


def same_bytes(found: dict[str, torch.Tensor], expected: dict[str, NDArray[Any]]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].cpu().numpy().tobytes() == part.tobytes() for name, part in expected.items()
    )


def by_kernel(codec: str, states: torch.Tensor, channel_scale: torch.Tensor) -> dict[str, torch.Tensor]:
    result = empty_parts(codec, states)
    quantise_kernel.quantise_into(codec, states, channel_scale, result)
    return result


def tensor(bits: NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(DEVICE)


@codecs
@pytest.mark.parametrize("hidden_size", [64, 576])
@pytest.mark.parametrize("seed", range(3))
def test_kernels_give_the_bytes_of_the_reference(codec: str, hidden_size: int, seed: int) -> None:
    bits, channel_scale = wild_states(12, hidden_size, seed)
    found = by_kernel(codec, tensor(bits), torch.from_numpy(channel_scale).to(DEVICE))
    assert same_bytes(found, encode(codec, bits, channel_scale))


@codecs
def test_rows_may_lie_apart_in_memory_and_be_none(codec: str) -> None:
    bits, channel_scale = wild_states(8, 64, 9)
    layers, scale = tensor(np.stack([bits, bits[::-1]], axis=1)), torch.from_numpy(channel_scale).to(DEVICE)
    assert same_bytes(by_kernel(codec, layers[:, 0], scale), encode(codec, bits, channel_scale))
    assert len(by_kernel(codec, layers[:0, 0], scale)["codes"]) == 0


def test_int4_kernels_leave_half_groups_to_plain_torch() -> None:
    assert quantise_kernel.fits("int4", 2 * GROUP_SIZE) and not quantise_kernel.fits("int4", 3 * GROUP_SIZE)
    assert quantise_kernel.fits("int8", 3 * GROUP_SIZE)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from precompute import quantise_kernel
def compiled(kernel, codes, constants):
    types = {"states": "*i16", "row_stride": "i32", "channel_scale": "*fp32", "codes": codes, "group_scale": "*u8"}
    types |= {"token_scale": "*fp32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["cubin"]
for codes, fp8 in (("*i8", False), ("*u8", True)):
    print(len(compiled(quantise_kernel._byte_rows, codes, {"HIDDEN": 5120, "BLOCK": 8192, "FP8": fp8})))
print(len(compiled(quantise_kernel._int4_rows, "*u8", {"NUM_GROUPS": 80, "BLOCK": 128})))
"""


@pytest.mark.slow
def test_the_kernels_compile_to_machine_code_of_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@codecs
@pytest.mark.parametrize("hidden_size", [96, 576, 5120])
def test_a_gpu_gives_the_bytes_of_the_reference(codec: str, hidden_size: int) -> None:
    bits, channel_scale = wild_states(2000, hidden_size, 0)
    found = quantise(codec, tensor(bits), torch.from_numpy(channel_scale).cuda())
    assert same_bytes(found, encode(codec, bits, channel_scale))
