"""Torch's codes against the numpy reference, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_tools.codecs import float32_to_bf16_bits
from cache_tools.quantise import QUANTISED, encode
from precompute.quantise import quantise, quantise_torch

HIDDEN = 64
FINITE_BITS = st.integers(0, 2**16 - 1).filter(lambda bits: (bits & 0x7F80) != 0x7F80)
codecs = pytest.mark.parametrize("codec", QUANTISED)


def bfloat16(bits: NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def assert_same_bytes(codec: str, bits: NDArray[np.uint16], channel_scale: NDArray[np.float32]) -> None:
    expected = encode(codec, bits, channel_scale)
    found = quantise(codec, bfloat16(bits), torch.from_numpy(channel_scale))
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert found[name].numpy().dtype == part.dtype
        assert found[name].numpy().tobytes() == part.tobytes(), name


@codecs
@given(rows=st.lists(st.lists(FINITE_BITS, min_size=HIDDEN, max_size=HIDDEN), min_size=1, max_size=3), data=st.data())
def test_any_finite_rows_give_the_bytes_of_the_reference(
    codec: str, rows: list[list[int]], data: st.DataObject
) -> None:
    scales = st.floats(2.0**-100, 2.0**100, width=32)
    channel_scale = data.draw(st.lists(scales, min_size=HIDDEN, max_size=HIDDEN))
    assert_same_bytes(codec, np.array(rows, np.uint16), np.array(channel_scale, np.float32))


@codecs
@pytest.mark.parametrize("hidden_size", [32, 96, 576])
def test_states_of_several_blocks_give_the_bytes_of_the_reference(codec: str, hidden_size: int) -> None:
    rng = np.random.default_rng(hidden_size)
    channel_scale = np.exp(rng.normal(0, 2, hidden_size)).astype(np.float32)
    sizes = channel_scale * np.exp(rng.normal(0, 2, (1000, 1)))
    bits = float32_to_bf16_bits((rng.normal(size=(1000, hidden_size)) * sizes).astype(np.float32))
    bits[::50] = 0
    assert_same_bytes(codec, bits, channel_scale)


@codecs
def test_rows_may_lie_apart_in_memory(codec: str) -> None:
    states = torch.randn(9, 3, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = torch.linspace(0.5, 2, HIDDEN)
    apart, together = quantise(codec, states[:, 1], scale), quantise(codec, states[:, 1].contiguous(), scale)
    assert all(torch.equal(apart[name], together[name]) for name in together)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@codecs
def test_torch_on_cuda_gives_the_bytes_of_the_cpu(codec: str) -> None:
    states = torch.randn(300, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = torch.linspace(0.01, 20, 576)
    expected = quantise_torch(codec, states, scale)
    found = quantise_torch(codec, states.cuda(), scale.cuda())
    assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)
