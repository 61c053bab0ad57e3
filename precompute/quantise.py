"""Quantising hidden states on the device that computed them, so that codes instead of bfloat16 leave it.

`cache_tools.quantise` says what the codes are. On the CPU the bytes are the same as there; on CUDA a Triton kernel does
the same arithmetic in one pass over memory.
Shapes: N = tokens, H = hidden size, G = channels of a group.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from cache_tools.quantise import (
    E4M3FN,
    FP8_MAX,
    GROUP_SIZE,
    INT4_CANDIDATES,
    INT4_MAX,
    INT4_MIN,
    INT4_TOKEN_MAX,
    INT8_MAX,
    MAX_MAGNITUDE,
    MIN_TOKEN_SCALE,
    parts,
)

# Float32 copies of so many values stay in the cache of a core, and bound the memory that a batch takes.
_VALUES_PER_BLOCK = 2**18


def quantise(codec: str, states: Tensor, channel_scale: Tensor) -> dict[str, Tensor]:
    """The arrays of `cache_tools.quantise.parts` for one layer, on the device of `states`.

    Args:
        states: [N, H] bfloat16, finite, each row contiguous.
        channel_scale: [H] float32, on the same device.
    """
    assert states.dtype == torch.bfloat16 and channel_scale.dtype == torch.float32
    if states.is_cuda and _has_triton():
        from precompute import quantise_kernel

        if quantise_kernel.fits(codec, states.shape[1]):
            result = empty_parts(codec, states)
            quantise_kernel.quantise_into(codec, states, channel_scale, result)
            return result
    return quantise_torch(codec, states, channel_scale)


def quantise_torch(codec: str, states: Tensor, channel_scale: Tensor) -> dict[str, Tensor]:
    """`quantise` in plain torch operations."""
    num_rows, hidden_size = states.shape
    result = empty_parts(codec, states)
    block_rows = max(_VALUES_PER_BLOCK // hidden_size, 1)
    encode = {"int8": _encode_int8, "fp8": _encode_fp8, "int4": _encode_int4}[codec]
    for first in range(0, num_rows, block_rows):
        rows = slice(first, first + block_rows)
        encode(states[rows].float() / channel_scale, {name: part[rows] for name, part in result.items()})
    return result


def empty_parts(codec: str, states: Tensor) -> dict[str, Tensor]:
    """Uninitialised arrays for the codes of `states` [N, H], on its device."""
    num_rows, hidden_size = states.shape
    return {
        name: torch.empty((num_rows, *part.row_shape), dtype=getattr(torch, part.dtype), device=states.device)
        for name, part in parts(codec, hidden_size).items()
    }


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _divided_by_token_scale(scaled: Tensor, largest_code: float, token_scale: Tensor) -> Tensor:
    """Fills `token_scale` [N], and divides `scaled` [N, H] by it in place."""
    magnitude = scaled.abs().amax(dim=1).clamp_(max=float(MAX_MAGNITUDE))
    # A tensor as the divisor: by a plain number, CUDA multiplies with the rounded reciprocal instead.
    divisor = torch.tensor(largest_code, device=scaled.device)
    torch.clamp(magnitude / divisor, min=float(MIN_TOKEN_SCALE), out=token_scale)
    return scaled.div_(token_scale[:, None])


def _encode_int8(scaled: Tensor, result: dict[str, Tensor]) -> None:
    limit = float(INT8_MAX)
    normed = _divided_by_token_scale(scaled, limit, result["token_scale"])
    result["codes"].copy_(normed.round_().clamp_(-limit, limit))


def _encode_fp8(scaled: Tensor, result: dict[str, Tensor]) -> None:
    normed = _divided_by_token_scale(scaled, float(FP8_MAX), result["token_scale"])
    result["codes"].copy_(_e4m3fn_codes(normed))


def _encode_int4(scaled: Tensor, result: dict[str, Tensor]) -> None:
    limit, half = float(INT4_TOKEN_MAX), scaled.shape[1] // 2
    normed = _divided_by_token_scale(scaled, limit, result["token_scale"]).clamp_(-limit, limit)
    groups = normed.view(len(normed), -1, GROUP_SIZE)
    group_scale, codes = _int4_groups(groups)
    shifted = codes.flatten(1).add_(-float(INT4_MIN)).to(torch.uint8)
    result["group_scale"].copy_(group_scale)
    torch.bitwise_or(shifted[:, :half], shifted[:, half:] << 4, out=result["codes"])


def _int4_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The best scale of each group as e4m3fn codes [N, H / G], and int4 codes [N, H / G, G] as float32."""
    table = torch.from_numpy(E4M3FN).to(groups.device)
    high, low = groups.amax(dim=2), groups.amin(dim=2)
    covering = _e4m3fn_codes(torch.maximum(high.abs(), low.abs()) * (-1 / float(INT4_MIN))).int()
    sign = torch.where(high > -low, 0x80, 0).int()
    best = torch.zeros_like(covering)
    smallest_error = torch.full_like(high, torch.inf)
    for step in INT4_CANDIDATES:
        code = (covering + step).clamp_(1, 0x7E).bitwise_or_(sign)
        scale = table[code]
        wanted = groups / scale[:, :, None]
        residual = wanted.sub_(_int4_codes(wanted)).abs_()
        error_units = residual.mul_(64).clamp_(max=256).round_()
        error = error_units.square_().sum(dim=2).mul_(scale).mul_(scale)
        best = torch.where(error < smallest_error, code, best)
        smallest_error = torch.minimum(error, smallest_error)
    return best, _int4_codes(groups / table[best][:, :, None])


def _int4_codes(wanted: Tensor) -> Tensor:
    return wanted.clamp(float(INT4_MIN), float(INT4_MAX)).round_()


def _e4m3fn_codes(values: Tensor) -> Tensor:
    """e4m3fn codes as uint8; the conversion itself would turn what lies far beyond 448 into NaN."""
    limit = float(FP8_MAX)
    return values.clamp(-limit, limit).to(torch.float8_e4m3fn).view(torch.uint8)
