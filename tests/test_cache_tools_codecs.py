"""bfloat16 conversion against torch, chunk bytes against numcodecs and a plain CRC32C."""

from __future__ import annotations

import hashlib
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_tools.codecs import (
    ChunkCodec,
    ChunkError,
    bf16_to_float32,
    content_id,
    float32_to_bf16_bits,
)


def plain_crc32c(content: bytes) -> int:
    """CRC32C bit by bit, from its definition (reflected polynomial 0x82F63B78)."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def bits_of(values: torch.Tensor) -> NDArray[np.uint16]:
    return values.view(torch.int16).numpy().view(np.uint16)


def test_every_bfloat16_pattern_has_the_value_torch_gives_it() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(bf16_to_float32(bits).view(np.uint32), expected.view(np.uint32))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_rounding_to_bfloat16_is_what_torch_does(patterns: list[int]) -> None:
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    ours, theirs = float32_to_bf16_bits(values), bits_of(torch.from_numpy(values).bfloat16())
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~is_nan], theirs[~is_nan])
    assert np.isnan(bf16_to_float32(ours[is_nan])).all()


def test_ties_round_to_even_and_the_largest_finite_values_to_infinity() -> None:
    values = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF7FFFFF, 0x80000001], dtype=np.uint32)
    expected = [0x3F80, 0x3F82, 0x7F80, 0xFF80, 0x8000]
    assert float32_to_bf16_bits(values.view(np.float32)).tolist() == expected


def test_bfloat16_survives_the_way_to_float32_and_back() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[~np.isnan(bf16_to_float32(bits))]
    np.testing.assert_array_equal(float32_to_bf16_bits(bf16_to_float32(bits)), bits)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", "float32"])
def test_chunk_bytes_are_little_endian_values_then_blosc_then_crc(dtype: str, compressed: bool) -> None:
    values = np.arange(600).reshape(20, 30).astype(dtype)
    encoded = ChunkCodec(values.itemsize, compressed).encode(values)
    content, crc = encoded[:-4], int.from_bytes(encoded[-4:], "little")
    assert crc == plain_crc32c(content)
    plain = numcodecs.Blosc().decode(content) if compressed else content
    assert bytes(plain) == values.astype(values.dtype.newbyteorder("<")).tobytes()


@pytest.mark.parametrize("compressed", [False, True])
def test_decoding_gives_the_values_back_and_the_same_values_the_same_bytes(compressed: bool) -> None:
    # Two Blosc blocks: with Blosc's own threads their order, and so the bytes, would depend on timing.
    values = np.random.default_rng(0).integers(0, 300, (64, 5120), dtype=np.uint16)
    codec = ChunkCodec(2, compressed)
    encoded = codec.encode(values)
    assert all(codec.encode(values) == encoded for _ in range(5))
    out = np.zeros_like(values)
    codec.decode(np.frombuffer(encoded, dtype=np.uint8), out)
    np.testing.assert_array_equal(out, values)


@given(st.data(), st.booleans())
def test_any_flipped_bit_or_missing_tail_of_a_chunk_is_noticed(data: Any, compressed: bool) -> None:
    values = np.arange(96, dtype=np.uint16).reshape(8, 12)
    codec = ChunkCodec(2, compressed)
    damaged = np.frombuffer(codec.encode(values), dtype=np.uint8).copy()
    if data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        damaged = damaged[: data.draw(st.integers(0, len(damaged) - 1))]
    with pytest.raises(ChunkError):
        codec.decode(damaged, np.empty_like(values))


def test_content_id_is_blake2b_of_little_endian_ids_and_mask() -> None:
    ids, mask = np.array([1, 70000, 3], dtype=np.int32), np.array([0, 1, 1], dtype=np.uint8)
    plain = bytes([1, 0, 0, 0, 0x70, 0x11, 1, 0, 3, 0, 0, 0]) + bytes([0, 1, 1])
    assert content_id(ids, mask) == hashlib.blake2b(plain, digest_size=16).digest()
    assert content_id(ids.astype(">i4"), mask) == content_id(ids, mask)
