"""Size of one layer's values: what the seal of a shard says of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_tools.codecs import BF16_MAGNITUDE, bf16_to_float32
from cache_tools.files import Json

STATISTICS_STRIDE = 32
"""One of so many rows of a sample is measured."""
_ROWS = 64  # float32 copies of more rows would leave the processor's cache
_SQUARABLE = 1e15  # the sum of thousands of squares of this still fits float32


@dataclass(frozen=True)
class LayerSize:
    """Sums over some rows of a layer."""

    sum_of_squares: float = 0.0
    abs_max: float = 0.0
    num_values: int = 0

    def __add__(self, other: LayerSize) -> LayerSize:
        return LayerSize(
            self.sum_of_squares + other.sum_of_squares,
            max(self.abs_max, other.abs_max),
            self.num_values + other.num_values,
        )

    def to_dict(self) -> dict[str, Json]:
        """Root mean square and largest magnitude; six digits, so that the order of additions does not show."""
        rms = (self.sum_of_squares / self.num_values) ** 0.5 if self.num_values else 0.0
        return {"rms": float(f"{rms:.6g}"), "abs_max": self.abs_max}


def measure(bits: NDArray[np.uint16]) -> LayerSize:
    """Sizes of bfloat16 bit patterns [n, hidden_size], all finite."""
    total, largest = 0.0, 0
    for first in range(0, len(bits), _ROWS):
        block = bits[first : first + _ROWS]
        block_max = int((block & BF16_MAGNITUDE).max())
        values = bf16_to_float32(block)
        is_large = float(_value(block_max)) > _SQUARABLE
        sums = np.einsum("ij,ij->i", values, values, dtype="f8" if is_large else "f4")
        total += float(sums.sum(dtype=np.float64))
        largest = max(largest, block_max)
    return LayerSize(total, _value(largest), bits.size)


def _value(bits: int) -> float:
    return float(bf16_to_float32(np.array([bits], dtype=np.uint16))[0])
