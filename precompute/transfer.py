"""Hidden states from the device into host memory, beside the next forward pass.

Shapes: N = tokens of a batch, F = kept layers, H = hidden size.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# One being filled by the copy stream, one being encoded, one waiting between them.
_NUM_BUFFERS = 3


class HostCopy:
    """Hidden states of one batch on their way to host memory."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        arrived: torch.cuda.Event | None = None,
        buffers: queue.Queue[Tensor | None] | None = None,
        buffer: Tensor | None = None,
    ) -> None:
        self._tensors, self._arrived, self._buffers, self._buffer = tensors, arrived, buffers, buffer

    def wait(self) -> list[NDArray[np.uint16]]:
        """bfloat16 bit patterns [N, H] of each layer. They are valid until `release`."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.view(torch.int16).numpy().view(np.uint16) for tensor in self._tensors]

    def release(self) -> None:
        """Gives the memory back for the next batch."""
        if self._buffers is not None:
            self._buffers.put(self._buffer)


class HostCopier:
    """Starts copies. On the CPU there is nothing to copy; on CUDA they run on a stream of their own."""

    def __init__(self, device: torch.device, *, num_layers: int, max_tokens: int, hidden_size: int) -> None:
        """`max_tokens`: most tokens of a batch without padding; pinned buffers have this size."""
        cuda: Any = torch.cuda  # its constructors carry no types
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._shape = (num_layers, max_tokens, hidden_size)
        self._buffers: queue.Queue[Tensor | None] = queue.Queue()
        for _ in range(_NUM_BUFFERS):
            self._buffers.put(None)  # pinned when first used: a short run needs only one

    def start(self, layers: Sequence[Tensor]) -> HostCopy:
        """Begins to copy bfloat16 [N, H] of each layer. Waits while all buffers are in use."""
        if self._stream is None:
            return HostCopy(layers)
        buffer = self._buffers.get()
        if buffer is None:
            buffer = torch.empty(self._shape, dtype=torch.bfloat16, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        targets = [buffer[index, : len(layer)] for index, layer in enumerate(layers)]
        with torch.cuda.stream(self._stream):
            for target, layer in zip(targets, layers, strict=True):
                target.copy_(layer, non_blocking=True)
                layer.record_stream(self._stream)  # its memory must not be reused before the copy is done
            arrived = self._stream.record_event()
        return HostCopy(targets, arrived, self._buffers, buffer)
