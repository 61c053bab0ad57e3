"""The Triton kernels of `precompute.quantise`: one program per token, one pass over its hidden state.

Division is IEEE 754's, rounding goes to nearest with ties to even, and sums are of whole numbers that float32 holds
exactly, so the bytes are those of the numpy reference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_tools.quantise import GROUP_SIZE, INT4_CANDIDATES

_GROUP = tl.constexpr(GROUP_SIZE)
_FIRST_STEP, _LAST_STEP = tl.constexpr(INT4_CANDIDATES[0]), tl.constexpr(INT4_CANDIDATES[-1])
_MIN_TOKEN_SCALE = tl.constexpr(2.0**-100)
_MAX_MAGNITUDE = tl.constexpr(2.0**126)
# Adding and subtracting this rounds magnitudes below 2^22 to whole numbers.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)


def fits(codec: str, hidden_size: int) -> bool:
    """int4 packs two halves of a row into one, so each half must hold whole groups here."""
    return codec != "int4" or hidden_size % (2 * GROUP_SIZE) == 0


def quantise_into(codec: str, states: Tensor, channel_scale: Tensor, result: Mapping[str, Tensor]) -> None:
    """Fills `result`, contiguous; the rest as in `precompute.quantise.quantise`, for a hidden size that `fits`."""
    num_rows, hidden_size = states.shape
    assert fits(codec, hidden_size) and states.stride(1) == 1 and channel_scale.is_contiguous()
    inputs = (states.view(torch.int16), states.stride(0), channel_scale)
    if num_rows == 0:
        return
    if codec == "int4":
        num_groups = hidden_size // (2 * GROUP_SIZE)
        _int4_rows[(num_rows,)](
            *inputs,
            result["codes"],
            result["group_scale"],
            result["token_scale"],
            NUM_GROUPS=num_groups,
            BLOCK=triton.next_power_of_2(num_groups),
            num_warps=8,
        )
    else:
        _byte_rows[(num_rows,)](
            *inputs,
            result["codes"],
            result["token_scale"],
            HIDDEN=hidden_size,
            BLOCK=triton.next_power_of_2(hidden_size),
            FP8=codec == "fp8",
            num_warps=8,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _byte_rows(
    states: tl.tensor,
    row_stride: tl.tensor,
    channel_scale: tl.tensor,
    codes: tl.tensor,
    token_scale: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    scaled = _scaled(states + row * row_stride, channel_scale, column, inside)
    limit = 448.0 if FP8 else 127.0
    scale = _token_scale(tl.max(tl.abs(scaled), axis=0), limit)
    tl.store(token_scale + row, scale)
    normed = tl.div_rn(scaled, tl.zeros_like(scaled) + scale)
    code = _e4m3fn_code(normed) if FP8 else _rounded(tl.minimum(tl.maximum(normed, -127.0), 127.0)).to(tl.int32)
    tl.store(codes + row * HIDDEN + column, code.to(codes.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _int4_rows(
    states: tl.tensor,
    row_stride: tl.tensor,
    channel_scale: tl.tensor,
    codes: tl.tensor,
    group_scale: tl.tensor,
    token_scale: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`NUM_GROUPS` is that of half a row: group g of the lower half is packed with group g of the upper one."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK)
    inside_group = group < NUM_GROUPS
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = inside_group[:, None] & (tl.arange(0, _GROUP)[None, :] >= 0)
    half = NUM_GROUPS * _GROUP
    low = _scaled(states + row * row_stride, channel_scale, column, inside)
    high = _scaled(states + row * row_stride, channel_scale, column + half, inside)
    largest = tl.max(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1), axis=0)
    scale = _token_scale(largest, 2048.0)
    tl.store(token_scale + row, scale)
    low_scale, low_code = _int4_groups(low, scale)
    high_scale, high_code = _int4_groups(high, scale)
    scales = group_scale + row * (2 * NUM_GROUPS) + group
    tl.store(scales, low_scale.to(tl.uint8), mask=inside_group)
    tl.store(scales + NUM_GROUPS, high_scale.to(tl.uint8), mask=inside_group)
    tl.store(codes + row * half + column, (low_code | (high_code << 4)).to(tl.uint8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(states: tl.tensor, channel_scale: tl.tensor, column: tl.tensor, inside: tl.tensor) -> tl.tensor:
    bits = tl.load(states + column, mask=inside, other=0).to(tl.int32)
    values = (bits << 16).to(tl.float32, bitcast=True)
    return tl.div_rn(values, tl.load(channel_scale + column, mask=inside, other=1.0))


@triton.jit  # type: ignore[untyped-decorator]
def _token_scale(largest: tl.tensor, largest_code: tl.tensor) -> tl.tensor:
    limited = tl.minimum(largest, _MAX_MAGNITUDE)
    return tl.maximum(tl.div_rn(limited, limited * 0.0 + largest_code), _MIN_TOKEN_SCALE)


@triton.jit  # type: ignore[untyped-decorator]
def _int4_groups(scaled: tl.tensor, token_scale: tl.tensor) -> tl.tensor:
    """The best scale of each group (row of `scaled`) as e4m3fn code, and codes plus 8; both int32."""
    normed = tl.div_rn(scaled, tl.zeros_like(scaled) + token_scale)
    groups = tl.minimum(tl.maximum(normed, -2048.0), 2048.0)
    high, low = tl.max(groups, axis=1), tl.min(groups, axis=1)
    covering = _e4m3fn_code(tl.maximum(tl.abs(high), tl.abs(low)) * 0.125)
    sign = tl.where(high > -low, 0x80, 0)
    best = covering * 0
    smallest_error = high * 0.0 + float("inf")
    for step in tl.static_range(_FIRST_STEP, _LAST_STEP - 1, -1):
        code = tl.minimum(tl.maximum(covering + step, 1), 0x7E) | sign
        scale = _e4m3fn_value(code)
        wanted = _over_scale(groups, scale)
        residual = tl.abs(wanted - _int4_code(wanted))
        error_units = _rounded(tl.minimum(residual * 64.0, 256.0))
        error = tl.sum(error_units * error_units, axis=1) * scale * scale
        best = tl.where(error < smallest_error, code, best)
        smallest_error = tl.minimum(error, smallest_error)
    codes = _int4_code(_over_scale(groups, _e4m3fn_value(best)))
    return best, codes.to(tl.int32) + 8


@triton.jit  # type: ignore[untyped-decorator]
def _over_scale(groups: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return tl.div_rn(groups, tl.zeros_like(groups) + scale[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _int4_code(wanted: tl.tensor) -> tl.tensor:
    return _rounded(tl.minimum(tl.maximum(wanted, -8.0), 7.0))


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(values: tl.tensor) -> tl.tensor:
    return (values + _ROUNDER) - _ROUNDER


@triton.jit  # type: ignore[untyped-decorator]
def _e4m3fn_code(values: tl.tensor) -> tl.tensor:
    """int32; as `cache_tools.quantise.float32_to_e4m3fn`."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(values), 448.0)
    wide = magnitude.to(tl.int32, bitcast=True)
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - 960
    subnormal = _rounded(magnitude * 512.0).to(tl.int32)
    return tl.where(magnitude < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit  # type: ignore[untyped-decorator]
def _e4m3fn_value(code: tl.tensor) -> tl.tensor:
    """float32 of finite e4m3fn codes."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 0x80, -value, value)
