"""Training the blocks of a pack in slices, so that memory does not grow with their number.

The context rows are the same for all blocks, and so are their keys and values in each draft layer: these are computed
once. Each slice of blocks runs forward and backward by itself and leaves its gradient at them; one backward pass over
the context follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Slots (blocks * block size) of a slice: enough for the matrix products. Activations take about 1 MB a slot with the
# drafter for Qwen3.6-27B, 0.1 MB with the demo's.
_SLICE_SLOTS = {"cpu": 1024, "cuda": 8192}


class SharedContext:
    """Keys and values of the context rows of a pack, [T, G, D] each per draft layer, cut off from what made them."""

    def __init__(self, made: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._made = made
        self.rows = [(keys.detach().requires_grad_(), values.detach().requires_grad_()) for keys, values in made]
        """What the slices of blocks attend to."""

    def backward(self) -> None:
        """Passes the gradients that the slices left on to the drafter's weights; call it once, after the last slice."""
        outputs = [tensor for pair in self._made for tensor in pair]
        gradients = [tensor.grad for pair in self.rows for tensor in pair]
        torch.autograd.backward(outputs, gradients)


def blocks_per_slice(block_size: int, device: torch.device) -> int:
    """The most blocks that run forward and backward at a time on a device."""
    return max(1, _SLICE_SLOTS.get(device.type, _SLICE_SLOTS["cpu"]) // block_size)


def block_slices(num_blocks: int, largest: int) -> Iterator[slice]:
    """Cuts the blocks of a pack, in order, into as few slices of at most `largest` as will do, nearly equal in size."""
    count = -(-num_blocks // largest)
    bounds = [num_blocks * i // count for i in range(count + 1)]
    for first, end in itertools.pairwise(bounds):
        yield slice(first, end)
