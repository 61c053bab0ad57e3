"""Quantised hidden states: the numpy reference of the codecs int8, fp8 and int4.

A value is a small code times a scale of its token times a static scale of its channel. Hidden states have a few
channels hundreds of times larger than the rest, the same ones for every token: without the scale per channel the median
channel of int8 is wrong by 25-100 %, with it by 0.8 %. The scale per token follows the size of the token.

Everything here is float32, one correctly rounded operation after the other in the order that is written down, so that
another implementation can give the same bytes: division as IEEE 754 has it, rounding to nearest with ties to even.
Shapes: N = rows (tokens), H = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_tools.codecs import bf16_to_float32
from cache_tools.errors import ConfigError

QUANTISED = ("int8", "fp8", "int4")

GROUP_SIZE = 32
"""Neighbouring channels that share one scale in int4."""
INT4_CANDIDATES = (1, 0, -1, -2)
"""Scales that int4 tries for each group: steps of the e4m3fn code from the one that just covers the group."""

INT8_MAX = np.float32(127)
FP8_MAX = np.float32(448)
"""The largest finite value of e4m3fn."""
INT4_MIN, INT4_MAX = np.float32(-8), np.float32(7)
INT4_TOKEN_MAX = np.float32(8 * 256)
"""What the largest magnitude of a row becomes in int4: its group has a scale of about 256, below the 448 of e4m3fn."""

# A token scale is a normal number, also of a row of zeros: nothing divides by zero or by a denormal number, which some
# devices flush to zero. The largest magnitude is cut off where 127 scales could still overflow.
MIN_TOKEN_SCALE = np.float32(2.0**-100)
MAX_MAGNITUDE = np.float32(2.0**126)

_MIN_RELATIVE_SCALE = 2.0**-10


@dataclass(frozen=True)
class Part:
    """One array of a quantised layer: its Zarr data type, and the shape of one row of it."""

    dtype: str
    row_shape: tuple[int, ...]


def parts(codec: str, hidden_size: int) -> dict[str, Part]:
    """The arrays that hold one layer in a codec of `QUANTISED`, by name.

    Raises ConfigError when the codec cannot hold rows of this hidden size.
    """
    token_scale = Part("float32", ())
    if codec == "int8":
        return {"codes": Part("int8", (hidden_size,)), "token_scale": token_scale}
    if codec == "fp8":
        return {"codes": Part("uint8", (hidden_size,)), "token_scale": token_scale}
    assert codec == "int4", codec
    if hidden_size % GROUP_SIZE:
        raise ConfigError(
            f"the codec int4 needs a hidden size that is a multiple of {GROUP_SIZE}",
            got=f"hidden size {hidden_size}",
            fix="use the codec int8",
        )
    return {
        "codes": Part("uint8", (hidden_size // 2,)),
        "group_scale": Part("uint8", (hidden_size // GROUP_SIZE,)),
        "token_scale": token_scale,
    }


def arithmetic(codec: str) -> str:
    """What the values of a layer are, as a numpy expression over all rows of its arrays; of lossless codecs too."""
    lossless = "bits.view('bfloat16')"
    return {
        "bf16": lossless,
        "raw": lossless,
        "int8": "codes * token_scale[:, None] * channel_scale",
        "fp8": "codes.view('float8_e4m3fn').astype('float32') * token_scale[:, None] * channel_scale",
        "int4": "(concatenate([codes & 15, codes >> 4], axis=1).astype('float32') - 8)"
        f" * repeat(group_scale.view('float8_e4m3fn').astype('float32'), {GROUP_SIZE}, axis=1)"
        " * token_scale[:, None] * channel_scale",
    }[codec]


def encode(codec: str, bits: NDArray[np.uint16], channel_scale: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """The arrays of `parts` [N, ...] for bfloat16 bit patterns [N, H] of finite values.

    `channel_scale` [H]: finite, above zero. Values beyond 2^126 channel scales are cut off there.
    """
    with np.errstate(over="ignore", under="ignore"):
        scaled = bf16_to_float32(bits) / channel_scale
        return {"int8": _encode_int8, "fp8": _encode_fp8, "int4": _encode_int4}[codec](scaled)


def decode(codec: str, encoded: Mapping[str, NDArray[Any]], channel_scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values [N, H] from the arrays of `parts`, by the line that `arithmetic` spells out."""
    codes: NDArray[Any] = encoded["codes"]
    token_scale: NDArray[np.float32] = encoded["token_scale"][:, None]
    with np.errstate(under="ignore"):
        scaled: NDArray[np.float32]
        if codec == "int8":
            scaled = codes * token_scale
        elif codec == "fp8":
            scaled = E4M3FN[codes] * token_scale
        else:
            assert codec == "int4", codec
            scaled = unpack_int4(codes) * np.repeat(E4M3FN[encoded["group_scale"]], GROUP_SIZE, axis=1) * token_scale
        return scaled * channel_scale


def _token_scale(scaled: NDArray[np.float32], largest_code: np.float32) -> NDArray[np.float32]:
    """[N] so that the largest magnitude of each row of `scaled` [N, H] becomes `largest_code`."""
    magnitude = np.minimum(np.abs(scaled).max(axis=1), MAX_MAGNITUDE)
    token_scale: NDArray[np.float32] = np.maximum(magnitude / largest_code, MIN_TOKEN_SCALE)
    return token_scale


def _encode_int8(scaled: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    token_scale = _token_scale(scaled, INT8_MAX)
    codes = np.clip(np.rint(scaled / token_scale[:, None]), -INT8_MAX, INT8_MAX).astype(np.int8)
    return {"codes": codes, "token_scale": token_scale}


def _encode_fp8(scaled: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    token_scale = _token_scale(scaled, FP8_MAX)
    return {"codes": float32_to_e4m3fn(scaled / token_scale[:, None]), "token_scale": token_scale}


def _encode_int4(scaled: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    num_rows, hidden_size = scaled.shape
    token_scale = _token_scale(scaled, INT4_TOKEN_MAX)
    normed = np.clip(scaled / token_scale[:, None], -INT4_TOKEN_MAX, INT4_TOKEN_MAX)
    groups = normed.reshape(num_rows, hidden_size // GROUP_SIZE, GROUP_SIZE)
    group_scale = _int4_group_scale(groups)
    codes = np.rint(np.clip(groups / E4M3FN[group_scale][:, :, None], INT4_MIN, INT4_MAX))
    return {
        "codes": pack_int4(codes.reshape(num_rows, hidden_size)),
        "group_scale": group_scale,
        "token_scale": token_scale,
    }


def _int4_group_scale(groups: NDArray[np.float32]) -> NDArray[np.uint8]:
    """e4m3fn codes [N, H / G] of the scale with the smallest squared error, for `groups` [N, H / G, G].

    The sign of a scale gives the code -8, which has no positive twin, to the largest value of the group. Errors are
    counted in whole 64ths of the scale: such sums are exact in float32, in whatever order they are added up.
    """
    high, low = groups.max(axis=2), groups.min(axis=2)
    covering = float32_to_e4m3fn(np.maximum(np.abs(high), np.abs(low)) / -INT4_MIN).astype(np.int32)
    sign = np.where(high > -low, 0x80, 0)
    best = np.zeros_like(covering)
    smallest_error = np.full(covering.shape, np.inf, np.float32)
    for step in INT4_CANDIDATES:
        code = np.clip(covering + step, 1, 0x7E) | sign
        scale = E4M3FN[code]
        wanted = groups / scale[:, :, None]
        residual = np.abs(wanted - np.rint(np.clip(wanted, INT4_MIN, INT4_MAX)))
        error_units = np.rint(np.minimum(residual * np.float32(64), np.float32(256)))
        error = (error_units * error_units).sum(axis=2) * scale * scale
        best = np.where(error < smallest_error, code, best)
        smallest_error = np.minimum(error, smallest_error)
    return best.astype(np.uint8)


def pack_int4(codes: NDArray[np.float32]) -> NDArray[np.uint8]:
    """uint8 [N, H / 2] from whole numbers -8 to 7 [N, H].

    The low half of byte j is channel j plus 8, the high half channel j + H / 2 plus 8: both halves of a row unpack into
    neighbouring values.
    """
    half = codes.shape[1] // 2
    shifted = (codes + np.float32(8)).astype(np.uint8)
    return shifted[:, :half] | (shifted[:, half:] << np.uint8(4))


def unpack_int4(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The inverse of `pack_int4`."""
    halves = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=1)
    return halves.astype(np.float32) - np.float32(8)


def _e4m3fn_values() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    values = np.where(codes < 128, magnitude, -magnitude)
    values[[127, 255]] = np.nan
    return values.astype(np.float32)


E4M3FN = _e4m3fn_values()
"""[256] the value of every e4m3fn code: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7F and 0xFF are NaN."""


def float32_to_e4m3fn(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """e4m3fn codes of float32 values, rounded to nearest, ties to even; beyond 448 the nearest is 448, never NaN."""
    bits = np.ascontiguousarray(values).view(np.int32)
    magnitude = np.minimum(np.abs(values), FP8_MAX)
    wide = magnitude.view(np.int32)
    # 20 bits of mantissa go; 120 = the difference of the exponents' biases, above 3 bits of mantissa.
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = np.rint(magnitude * np.float32(512)).astype(np.int32)
    codes = np.where(magnitude < np.float32(2.0**-6), subnormal, normal)
    signed: NDArray[np.int32] = codes | ((bits >> 24) & 0x80)
    return signed.astype(np.uint8)


class ChannelCalibration:
    """Gathers the root mean square of every channel, the static scale of the codecs."""

    def __init__(self) -> None:
        self._squares: NDArray[np.float64] | None = None
        self._num_rows = 0

    def add(self, bits: NDArray[np.uint16]) -> None:
        """Counts bfloat16 bit patterns [N, H]. Leave out first tokens: their norm is 40-160 times the others'."""
        squares = np.square(bf16_to_float32(bits), dtype=np.float64).sum(axis=0)
        self._squares = squares if self._squares is None else self._squares + squares
        self._num_rows += len(bits)

    def scale(self) -> NDArray[np.float32]:
        """[H], finite and above zero.

        A silent channel gets 1/1024 of the median of those that are not: should it speak later, it must not crowd out
        the others. The scales of a silent layer are 1.
        """
        assert self._squares is not None, "no rows were added"
        rms = np.sqrt(self._squares / max(self._num_rows, 1))
        if not rms.any():
            return np.ones(len(rms), np.float32)
        kept: NDArray[np.float64] = np.maximum(rms, np.median(rms[rms > 0]) * _MIN_RELATIVE_SCALE)
        return kept.astype(np.float32)
