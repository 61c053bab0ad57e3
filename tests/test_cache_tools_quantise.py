"""Quantised codecs against ml_dtypes, plain Python, and bounds on the error that follow from the step of each code."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_tools.codecs import bf16_to_float32, float32_to_bf16_bits
from cache_tools.errors import ConfigError
from cache_tools.quantise import (
    E4M3FN,
    GROUP_SIZE,
    QUANTISED,
    ChannelCalibration,
    arithmetic,
    decode,
    encode,
    float32_to_e4m3fn,
    pack_int4,
    parts,
    unpack_int4,
)

HIDDEN = 64
FINITE_BITS = st.integers(0, 2**16 - 1).filter(lambda bits: (bits & 0x7F80) != 0x7F80)
codecs = pytest.mark.parametrize("codec", QUANTISED)


def normal_states(seed: int, num_rows: int = 50, spread: float = 3.0) -> NDArray[np.uint16]:
    """[num_rows, HIDDEN] bits: channels and tokens of very different size, as in hidden states."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(0, spread, HIDDEN)) * np.exp(rng.normal(0, 1, (num_rows, 1)))
    return float32_to_bf16_bits((rng.normal(size=(num_rows, HIDDEN)) * sizes).astype(np.float32))


def calibrated(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    calibration = ChannelCalibration()
    calibration.add(bits)
    return calibration.scale()


def relative_l2(bits: NDArray[np.uint16], decoded: NDArray[np.float32]) -> float:
    values = bf16_to_float32(bits)
    return float(np.linalg.norm(decoded - values) / np.linalg.norm(values))


def evaluated(codec: str, encoded: dict[str, NDArray[Any]], channel_scale: NDArray[np.float32]) -> Any:
    """What the published line of arithmetic gives, with nothing of ours in scope."""
    names = {"concatenate": np.concatenate, "repeat": np.repeat, "channel_scale": channel_scale}
    return eval(arithmetic(codec), {"__builtins__": {}}, {**names, **encoded})


def test_every_e4m3fn_code_has_the_value_ml_dtypes_gives_it() -> None:
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(E4M3FN.view(np.uint32)[:127], expected.view(np.uint32)[:127])
    np.testing.assert_array_equal(E4M3FN, expected)


@given(st.lists(st.floats(-460, 460, width=32) | st.floats(-0.03125, 0.03125, width=32), min_size=1))
def test_e4m3fn_rounding_is_that_of_ml_dtypes_and_saturates(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(float32_to_e4m3fn(values), expected)


def test_e4m3fn_ties_go_to_the_even_code_and_huge_values_to_448() -> None:
    codes = np.arange(126, dtype=np.uint8)
    middles = (E4M3FN[codes] + E4M3FN[codes + 1]) / np.float32(2)
    np.testing.assert_array_equal(float32_to_e4m3fn(middles), codes + (codes & 1))
    huge = np.array([449, 1e30, np.inf, -np.inf], np.float32)
    assert float32_to_e4m3fn(huge).tolist() == [0x7E, 0x7E, 0x7E, 0xFE]


@given(st.lists(st.integers(-8, 7), min_size=2, max_size=40).filter(lambda row: len(row) % 2 == 0))
def test_int4_packing_keeps_every_code_and_puts_the_halves_where_the_format_says(row: list[int]) -> None:
    packed = pack_int4(np.array([row], np.float32))
    assert unpack_int4(packed).tolist() == [row]
    half = len(row) // 2
    assert packed[0].tolist() == [row[j] + 8 + 16 * (row[j + half] + 8) for j in range(half)]


@codecs
@given(rows=st.lists(st.lists(FINITE_BITS, min_size=HIDDEN, max_size=HIDDEN), min_size=1, max_size=3), power=st.data())
def test_any_finite_rows_give_the_declared_arrays_and_finite_values(
    codec: str, rows: list[list[int]], power: st.DataObject
) -> None:
    bits = np.array(rows, np.uint16)
    exponents = power.draw(st.lists(st.integers(-100, 100), min_size=HIDDEN, max_size=HIDDEN))
    channel_scale = np.float32(2) ** np.array(exponents, np.float32)
    encoded = encode(codec, bits, channel_scale)
    declared = parts(codec, HIDDEN)
    assert encoded.keys() == declared.keys()
    for name, part in declared.items():
        assert encoded[name].dtype == part.dtype and encoded[name].shape == (len(bits), *part.row_shape)
    assert np.isfinite(encoded["token_scale"]).all() and (encoded["token_scale"] > 0).all()
    with np.errstate(over="ignore"):  # a channel scale that does not fit the data may overflow; NaN it must not be
        assert not np.isnan(decode(codec, encoded, channel_scale)).any()


@codecs
@pytest.mark.parametrize("seed", range(5))
def test_the_line_of_arithmetic_gives_exactly_what_decode_gives(codec: str, seed: int) -> None:
    bits = normal_states(seed)
    channel_scale = calibrated(bits)
    encoded = encode(codec, bits, channel_scale)
    np.testing.assert_array_equal(evaluated(codec, encoded, channel_scale), decode(codec, encoded, channel_scale))
    assert decode(codec, encoded, channel_scale).dtype == np.float32


@codecs
def test_rows_are_encoded_independently_of_each_other(codec: str) -> None:
    bits = normal_states(1)
    channel_scale = calibrated(bits)
    whole = encode(codec, bits, channel_scale)
    for row in range(0, len(bits), 7):
        alone = encode(codec, bits[row : row + 1], channel_scale)
        assert all(alone[name][0].tobytes() == whole[name][row].tobytes() for name in whole)


@codecs
def test_zeros_and_the_smallest_values_stay_zero_or_small(codec: str) -> None:
    bits = np.zeros((3, HIDDEN), np.uint16)
    bits[1], bits[2] = 1, 0x8000  # the smallest denormal, minus zero
    decoded = decode(codec, encode(codec, bits, np.ones(HIDDEN, np.float32)), np.ones(HIDDEN, np.float32))
    assert (decoded[0] == 0).all() and (decoded[2] == 0).all() and (np.abs(decoded[1]) < 1e-30).all()


def test_the_largest_magnitude_of_a_row_is_hit_exactly_by_a_code() -> None:
    bits = normal_states(2)
    channel_scale = np.ones(HIDDEN, np.float32)
    largest = np.abs(bf16_to_float32(bits)).max(axis=1)
    for codec, code in (("int8", 127), ("fp8", 448)):
        encoded = encode(codec, bits, channel_scale)
        np.testing.assert_array_equal(encoded["token_scale"], largest / np.float32(code))
        np.testing.assert_allclose(np.abs(decode(codec, encoded, channel_scale)).max(axis=1), largest, rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_int8_is_wrong_by_half_a_step_at_most(seed: int) -> None:
    bits = normal_states(seed)
    channel_scale = calibrated(bits)
    encoded = encode("int8", bits, channel_scale)
    error = np.abs(decode("int8", encoded, channel_scale) - bf16_to_float32(bits))
    assert (error <= encoded["token_scale"][:, None] * channel_scale * 0.50001).all()


@pytest.mark.parametrize("seed", range(5))
def test_fp8_is_wrong_by_a_sixteenth_at_most_where_it_has_all_its_bits(seed: int) -> None:
    bits = normal_states(seed)
    channel_scale = calibrated(bits)
    encoded = encode("fp8", bits, channel_scale)
    values = bf16_to_float32(bits)
    error = np.abs(decode("fp8", encoded, channel_scale) - values)
    smallest = encoded["token_scale"][:, None] * channel_scale * 2.0**-6
    assert (error <= np.maximum(np.abs(values), smallest) / 15.99).all()


@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.012), ("fp8", 0.03), ("int4", 0.1)])
def test_the_error_stays_in_its_class_when_channels_differ_a_thousandfold(codec: str, bound: float) -> None:
    calibration, bits = normal_states(3, 400), normal_states(3, 800)[400:]
    channel_scale = calibrated(calibration)
    assert relative_l2(bits, decode(codec, encode(codec, bits, channel_scale), channel_scale)) < bound


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_scales_calibrated_per_channel_beat_none_when_channels_differ(codec: str) -> None:
    bits = normal_states(4, 200)
    channel_scale, flat = calibrated(bits), np.ones(HIDDEN, np.float32)
    small = np.argsort(channel_scale)[: HIDDEN // 2]
    error, flat_error = (
        relative_l2(bits[:, small], decode(codec, encode(codec, bits, scale), scale)[:, small])
        for scale in (channel_scale, flat)
    )
    assert error < 0.13 and error < flat_error / 3


def best_int4_error(group: NDArray[np.float32]) -> float:
    """The least squared error that any e4m3fn scale, of either sign, gives a group, by trying all of them."""
    scales = E4M3FN[np.isfinite(E4M3FN) & (E4M3FN != 0)].astype(np.float64)[:, None]
    codes = np.clip(np.rint(group / scales), -8, 7)
    return float(np.square(codes * scales - group).sum(axis=1).min())


def test_int4_scales_are_nearly_the_best_of_all_there_are() -> None:
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(300, GROUP_SIZE)) * np.exp(rng.normal(0, 1, (300, 1)))).astype(np.float32)
    bits, ones = float32_to_bf16_bits(values), np.ones(GROUP_SIZE, np.float32)
    encoded = encode("int4", bits, ones)
    groups = bf16_to_float32(bits) / encoded["token_scale"][:, None]
    found = np.square((decode("int4", encoded, ones) - bf16_to_float32(bits)).astype(np.float64)).sum(axis=1)
    found /= encoded["token_scale"].astype(np.float64) ** 2
    best = np.array([best_int4_error(group) for group in groups])
    assert found.sum() < 1.05 * best.sum()


def test_a_group_of_zeros_of_either_sign_has_the_smallest_scale_and_codes_of_zero() -> None:
    bits = np.zeros((2, GROUP_SIZE), np.uint16)
    bits[1] = 0x8000
    encoded = encode("int4", bits, np.ones(GROUP_SIZE, np.float32))
    assert (encoded["group_scale"] == 1).all() and (encoded["codes"] == 0x88).all()


def test_int4_keeps_the_other_groups_of_a_row_with_an_outlier() -> None:
    bits = normal_states(7, spread=0.1)
    outlier = bits.copy()
    outlier[:, 0] = float32_to_bf16_bits(bf16_to_float32(bits[:, 0]) * np.float32(10_000))
    ones = np.ones(HIDDEN, np.float32)
    decoded = decode("int4", encode("int4", outlier, ones), ones)
    assert relative_l2(bits[:, GROUP_SIZE:], decoded[:, GROUP_SIZE:]) < 0.1


def test_int4_takes_about_a_quarter_of_bfloat16_and_names_a_hidden_size_it_cannot_hold() -> None:
    num_bytes = sum(
        np.dtype(part.dtype).itemsize * int(np.prod(part.row_shape)) for part in parts("int4", 5120).values()
    )
    assert 5 * num_bytes <= 13_700
    with pytest.raises(ConfigError, match=f"multiple of {GROUP_SIZE}"):
        parts("int4", 48)


def test_calibration_is_the_rms_of_each_channel_however_the_rows_are_cut() -> None:
    bits = normal_states(5, 60)
    values = bf16_to_float32(bits).astype(np.float64)
    calibration = ChannelCalibration()
    for rows in (bits[:1], bits[1:40], bits[40:40], bits[40:]):
        calibration.add(rows)
    np.testing.assert_allclose(calibration.scale(), np.sqrt((values**2).mean(axis=0)), rtol=1e-6)


def test_silent_channels_and_layers_have_usable_scales() -> None:
    bits = normal_states(6, spread=0.1)
    bits[:, 3] = 0
    scale = calibrated(bits)
    assert 0 < scale[3] < np.delete(scale, 3).min()
    assert (calibrated(np.zeros((4, HIDDEN), np.uint16)) == 1).all()
