"""Hidden states from the codes that a store holds, on the device that trains.

`cache_tools.quantise` says what the codes mean; this is the same arithmetic in the same order, so float32 results are
the same bits, and bfloat16 results those bits rounded once. On CUDA a Triton kernel does it in one pass over memory.
Shapes: T = tokens, F = layers, H = hidden size, G = channels of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from cache_tools.quantise import E4M3FN, GROUP_SIZE, INT4_MIN

# Float32 values of so many stay in the cache of a core, and bound the memory that a pack takes beside its result.
_VALUES_PER_BLOCK = 2**19


def dequantise(codec: str, parts: Mapping[str, Tensor], channel_scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Hidden states [T, F, H], contiguous, on the device of `parts`.

    Whatever scale per channel training applies costs nothing if it is multiplied into `channel_scale` beforehand. First
    tokens of samples are as wrong as their codes; the store holds them exactly, and the caller puts them in.

    Args:
        parts: the arrays of `cache_tools.quantise.parts`, with any strides except that a row is contiguous:
            `codes` [T, F, H], or [T, F, H / 2] for int4; `token_scale` [T, F]; for int4 `group_scale` [T, F, H / G].
        channel_scale: float32 [F, H].
        dtype: of the result, float32 or bfloat16.
    """
    codes = parts["codes"]
    num_tokens, num_layers, hidden_size = (*codes.shape[:2], channel_scale.shape[1])
    assert channel_scale.shape == (num_layers, hidden_size) and channel_scale.dtype == torch.float32
    assert dtype in (torch.float32, torch.bfloat16)
    out = torch.empty((num_tokens, num_layers, hidden_size), dtype=dtype, device=codes.device)
    if codes.is_cuda and _has_triton():
        from train import dequantise_kernel

        dequantise_kernel.dequantise(codec, parts, channel_scale.contiguous(), out)
        return out
    block_tokens = max(_VALUES_PER_BLOCK // (num_layers * hidden_size), 1)
    for first in range(0, num_tokens, block_tokens):
        block = {name: part[first : first + block_tokens] for name, part in parts.items()}
        values = _unscaled(codec, block).mul_(block["token_scale"][:, :, None])
        out[first : first + block_tokens] = values.mul_(channel_scale)
    return out


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _unscaled(codec: str, parts: Mapping[str, Tensor]) -> Tensor:
    """float32 [T, F, H] before the scales of token and channel; exact. The result is not shared with `parts`."""
    codes = parts["codes"]
    if codec == "int8":
        return codes.float()
    if codec == "fp8":
        return _e4m3fn(codes)
    assert codec == "int4", codec
    values = torch.cat([codes & 15, codes >> 4], dim=-1).float().add_(float(INT4_MIN))
    groups = values.view(*codes.shape[:2], -1, GROUP_SIZE)
    groups.mul_(_e4m3fn(parts["group_scale"])[:, :, :, None])
    return values


def _e4m3fn(codes: Tensor) -> Tensor:
    """float32 of e4m3fn codes. On the CPU a table is several times faster than torch's conversion."""
    if codes.is_cuda:
        return codes.view(torch.float8_e4m3fn).float()
    return torch.from_numpy(E4M3FN).index_select(0, codes.reshape(-1).int()).view(codes.shape)
