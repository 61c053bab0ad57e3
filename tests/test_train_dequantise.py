"""Hidden states from codes against the numpy reference, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.codecs import bf16_to_float32, float32_to_bf16_bits
from cache_tools.quantise import QUANTISED, ChannelCalibration, decode, encode
from train.dequantise import dequantise

codecs = pytest.mark.parametrize("codec", QUANTISED)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def encoded_layers(
    codec: str, num_tokens: int, hidden_size: int, num_layers: int = 3
) -> tuple[dict[str, Tensor], Tensor, NDArray[np.float32]]:
    """Parts [T, F, ...], channel scales [F, H], and the reference's values [T, F, H]."""
    rng = np.random.default_rng(hidden_size)
    layers, scales, values = [], [], []
    for _ in range(num_layers):
        sizes = np.exp(rng.normal(0, 2, hidden_size)) * np.exp(rng.normal(0, 2, (num_tokens, 1)))
        bits = float32_to_bf16_bits((rng.normal(size=(num_tokens, hidden_size)) * sizes).astype(np.float32))
        bits[::7] = 0
        calibration = ChannelCalibration()
        calibration.add(bits)
        scales.append(calibration.scale())
        layers.append(encode(codec, bits, scales[-1]))
        values.append(decode(codec, layers[-1], scales[-1]))
    parts = {name: torch.from_numpy(np.stack([layer[name] for layer in layers], axis=1)) for name in layers[0]}
    return parts, torch.from_numpy(np.stack(scales)), np.stack(values, axis=1)


def same_bits(found: Tensor, expected: NDArray[np.float32], dtype: torch.dtype) -> bool:
    """Bit for bit; minus zero equals zero."""
    if dtype == torch.bfloat16:
        expected = bf16_to_float32(float32_to_bf16_bits(expected))
    return found.dtype == dtype and bool(np.array_equal(found.float().cpu().numpy(), expected))


def to_device(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.to(DEVICE) for name, part in parts.items()}


@codecs
@dtypes
@pytest.mark.parametrize("hidden_size", [32, 96, 576])
def test_values_are_those_of_the_reference(codec: str, dtype: torch.dtype, hidden_size: int) -> None:
    parts, scale, expected = encoded_layers(codec, 700, hidden_size)
    assert same_bits(dequantise(codec, parts, scale, dtype=dtype), expected, dtype)


@codecs
def test_parts_may_lie_layer_by_layer_and_stay_as_they_were(codec: str) -> None:
    parts, scale, expected = encoded_layers(codec, 40, 64)
    apart = {name: part.transpose(0, 1).contiguous().transpose(0, 1) for name, part in parts.items()}
    before = {name: part.clone() for name, part in apart.items()}
    found = dequantise(codec, apart, scale, dtype=torch.float32)
    assert same_bits(found, expected, torch.float32) and found.is_contiguous()
    assert all(torch.equal(part, before[name]) for name, part in apart.items())


@codecs
def test_a_scale_of_training_may_be_multiplied_into_the_scale_of_the_channels(codec: str) -> None:
    parts, scale, expected = encoded_layers(codec, 40, 64)
    feature_scale = torch.linspace(0.1, 3, 64)
    found = dequantise(codec, parts, scale * feature_scale, dtype=torch.float32)
    torch.testing.assert_close(found, torch.from_numpy(expected) * feature_scale, rtol=1e-6, atol=0)


@codecs
def test_no_tokens_give_no_values(codec: str) -> None:
    parts, scale, _ = encoded_layers(codec, 5, 64)
    none = {name: part[:0] for name, part in parts.items()}
    assert dequantise(codec, none, scale, dtype=torch.bfloat16).shape == (0, 3, 64)


@codecs
@dtypes
@pytest.mark.parametrize("hidden_size", [32, 96, 576])
def test_kernels_give_the_values_of_the_reference(codec: str, dtype: torch.dtype, hidden_size: int) -> None:
    pytest.importorskip("triton", reason="the kernels need Triton")
    from train import dequantise_kernel

    parts, scale, expected = encoded_layers(codec, 9, hidden_size)
    apart = {name: part.transpose(0, 1).contiguous().transpose(0, 1) for name, part in to_device(parts).items()}
    for given in (to_device(parts), apart):
        out = torch.empty((9, 3, hidden_size), dtype=dtype, device=DEVICE)
        dequantise_kernel.dequantise(codec, given, scale.to(DEVICE), out)
        if dtype == torch.float32 or DEVICE == "cuda":
            assert same_bits(out, expected, dtype)
        else:  # Triton's interpreter cuts bfloat16 instead of rounding it
            torch.testing.assert_close(out.float(), torch.from_numpy(expected), rtol=2**-7, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@codecs
@dtypes
@pytest.mark.parametrize("hidden_size", [96, 576, 5120])
def test_a_gpu_gives_the_values_of_the_reference(mark: None, codec: str, dtype: torch.dtype, hidden_size: int) -> None:
    parts, scale, expected = encoded_layers(codec, 500, hidden_size)
    assert same_bits(dequantise(codec, to_device(parts), scale.to(DEVICE), dtype=dtype), expected, dtype)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from train import dequantise_kernel
def compiled(kernel, codes, constants):
    types = {"codes": codes, "group_scale": "*u8", "token_scale": "*fp32", "channel_scale": "*fp32", "out": "*bf16"}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
for codes, fp8 in (("*i8", False), ("*u8", True)):
    print(len(compiled(dequantise_kernel._byte_columns, codes, {"HIDDEN": 5120, "BLOCK": 2048, "FP8": fp8})))
print(len(compiled(dequantise_kernel._int4_columns, "*u8", {"HALF": 2560, "BLOCK": 2048})))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need Triton")
def test_the_kernels_compile_to_machine_code_of_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
