"""Hidden states of a pack as the store keeps them, and how they become the drafter's context features.

Letters as in `batches`; R = what one row of a part holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.quantise import QUANTISED, parts
from train.dequantise import dequantise

LOSSLESS_PART = "bits"


@dataclass(frozen=True)
class TappedStates:
    """Tapped layers of one pack, layer after layer. Codes are decoded on the device that needs the values."""

    codec: str
    parts: Mapping[str, Tensor]
    """[F, T, R] by name: `bits`, bfloat16 [F, T, H], of a lossless store, or the arrays of a quantised one."""
    first_rows: Tensor
    """int64 [D], rows of the first token of every document."""
    first: Tensor | None
    """bfloat16 [F, D, H], their exact values, where codes do not hold them."""
    channel_scale: Tensor | None
    """float32 [F, H], static scales of a quantised store."""

    @classmethod
    def of_bits(cls, bits: NDArray[np.uint16]) -> TappedStates:
        """From bfloat16 bit patterns [T, F, H], as a store gives them one sample at a time."""
        states = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).transpose(0, 1)
        return cls("raw", {LOSSLESS_PART: states}, torch.empty(0, dtype=torch.int64), None, None)

    def to_features(self, device: torch.device, dtype: torch.dtype, scale: Tensor) -> Tensor:
        """Context features [T, F * H] in `dtype` on `device`: the states times `scale`, [F * H] on `device`.

        `dtype` is float32 or bfloat16. Copies from page-locked memory are not waited for.
        """
        moved = {name: part.to(device, non_blocking=True).transpose(0, 1) for name, part in self.parts.items()}
        if self.first is None or self.channel_scale is None:
            bits = moved[LOSSLESS_PART]  # [T, F, H]
            scaled = torch.empty(bits.shape, dtype=dtype, device=device)
            torch.mul(bits, scale.view(bits.shape[1:]), out=scaled)  # one pass: transposes, converts, scales
            return scaled.flatten(1)
        by_layer = scale.view(self.channel_scale.shape)
        scaled = dequantise(self.codec, moved, self.channel_scale.to(device) * by_layer.float(), dtype=dtype)
        first = self.first.to(device).transpose(0, 1).to(dtype) * by_layer  # [D, F, H]
        return scaled.index_copy_(0, self.first_rows.to(device), first.to(dtype)).flatten(1)


class PackBuffer:
    """Memory for the parts of one pack, used again for pack after pack."""

    def __init__(self, token_budget: int, num_layers: int, hidden_size: int, codec: str) -> None:
        self._num_layers = num_layers
        self._shapes = _part_shapes(codec, hidden_size)
        self._memory = {
            name: _memory(num_layers * token_budget * math.prod(shape), dtype)
            for name, (dtype, shape) in self._shapes.items()
        }

    def views(self, num_tokens: int) -> dict[str, NDArray[np.generic]]:
        """[F, T, R] by name of the part, contiguous, so that a pack is one copy to the device."""
        return {
            name: memory[: self._num_layers * num_tokens * math.prod(self._shapes[name][1])].reshape(
                self._num_layers, num_tokens, *self._shapes[name][1]
            )
            for name, memory in self._memory.items()
        }


def bytes_per_token(codec: str, num_layers: int, hidden_size: int) -> int:
    """Memory that one token takes in a `PackBuffer`."""
    shapes = _part_shapes(codec, hidden_size).values()
    return num_layers * sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in shapes)


def as_tensors(views: Mapping[str, NDArray[np.generic]]) -> dict[str, Tensor]:
    """The same memory as tensors; bit patterns as bfloat16."""
    return {
        name: torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)
        if name == LOSSLESS_PART
        else torch.from_numpy(view)
        for name, view in views.items()
    }


def _part_shapes(codec: str, hidden_size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of one row of every part."""
    if codec not in QUANTISED:
        return {LOSSLESS_PART: ("uint16", (hidden_size,))}
    return {name: (part.dtype, part.row_shape) for name, part in parts(codec, hidden_size).items()}


def _memory(num_values: int, dtype: str) -> NDArray[np.generic]:
    """Page-locked where there is a GPU, so that the copy to it can overlap with computing."""
    if torch.cuda.is_available():
        num_bytes = num_values * np.dtype(dtype).itemsize
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().view(dtype)
    return np.empty(num_values, dtype)  # unlike torch, numpy asks for huge pages: a third of the time of first use
