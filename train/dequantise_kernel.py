"""The Triton kernels of `train.dequantise`: codes and scales are read once, hidden states written once."""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from cache_tools.quantise import GROUP_SIZE

_GROUP = tl.constexpr(GROUP_SIZE)
# Columns of one program; a thread of four warps then loads 8 or 16 neighbouring bytes at once.
_MAX_BLOCK = 2048


def dequantise(codec: str, parts: Mapping[str, Tensor], channel_scale: Tensor, out: Tensor) -> None:
    """Fills `out` [T, F, H], contiguous; the rest as in `train.dequantise.dequantise`."""
    codes, token_scale = parts["codes"], parts["token_scale"]
    num_tokens, num_layers, width = codes.shape
    assert codes.stride(2) == 1 and channel_scale.is_contiguous() and out.is_contiguous()
    if out.numel() == 0:
        return
    block = min(triton.next_power_of_2(width), _MAX_BLOCK)
    grid = (num_tokens * num_layers, triton.cdiv(width, block))
    inputs = (codes, *codes.stride()[:2], token_scale, *token_scale.stride(), channel_scale, out, num_layers)
    if codec == "int4":
        group_scale = parts["group_scale"]
        assert group_scale.stride(2) == 1
        _int4_columns[grid](*inputs, group_scale, *group_scale.stride()[:2], HALF=width, BLOCK=block)
    else:
        _byte_columns[grid](*inputs, HIDDEN=width, BLOCK=block, FP8=codec == "fp8")


@triton.jit  # type: ignore[untyped-decorator]
def _byte_columns(
    codes: tl.tensor,
    codes_token_stride: tl.tensor,
    codes_layer_stride: tl.tensor,
    token_scale: tl.tensor,
    scale_token_stride: tl.tensor,
    scale_layer_stride: tl.tensor,
    channel_scale: tl.tensor,
    out: tl.tensor,
    num_layers: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token, layer = row // num_layers, row % num_layers
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    code = tl.load(codes + token * codes_token_stride + layer * codes_layer_stride + column, mask=inside, other=0)
    values = _e4m3fn_value(code.to(tl.int32)) if FP8 else code.to(tl.float32)
    values *= tl.load(token_scale + token * scale_token_stride + layer * scale_layer_stride)
    values *= tl.load(channel_scale + layer * HIDDEN + column, mask=inside, other=0.0)
    tl.store(out + row * HIDDEN + column, values.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _int4_columns(
    codes: tl.tensor,
    codes_token_stride: tl.tensor,
    codes_layer_stride: tl.tensor,
    token_scale: tl.tensor,
    scale_token_stride: tl.tensor,
    scale_layer_stride: tl.tensor,
    channel_scale: tl.tensor,
    out: tl.tensor,
    num_layers: tl.tensor,
    group_scale: tl.tensor,
    group_token_stride: tl.tensor,
    group_layer_stride: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A byte holds channel `column` of the lower half of the row and the same one of the upper half."""
    row = tl.program_id(0).to(tl.int64)
    token, layer = row // num_layers, row % num_layers
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HALF
    code = tl.load(codes + token * codes_token_stride + layer * codes_layer_stride + column, mask=inside, other=0)
    scales = group_scale + token * group_token_stride + layer * group_layer_stride
    scale_of_token = tl.load(token_scale + token * scale_token_stride + layer * scale_layer_stride)
    for upper in tl.static_range(2):
        channel = column + upper * HALF
        whole = ((code.to(tl.int32) >> (4 * upper)) & 15) - 8
        scale = tl.load(scales + channel // _GROUP, mask=inside, other=0)
        values = whole.to(tl.float32) * _e4m3fn_value(scale.to(tl.int32)) * scale_of_token
        values *= tl.load(channel_scale + layer * (2 * HALF) + channel, mask=inside, other=0.0)
        tl.store(out + row * (2 * HALF) + channel, values.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _e4m3fn_value(code: tl.tensor) -> tl.tensor:
    """float32 of finite e4m3fn codes, int32."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 0x80, -value, value)
