"""Arrays of a batch from the device into host memory, beside the next forward pass.

Shapes: N = tokens of a batch.
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
    """Arrays of one batch on their way to host memory."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        arrived: torch.cuda.Event | None = None,
        buffers: queue.Queue[list[Tensor] | None] | None = None,
        buffer: list[Tensor] | None = None,
    ) -> None:
        self._tensors, self._arrived, self._buffers, self._buffer = tensors, arrived, buffers, buffer

    def wait(self) -> list[NDArray[Any]]:
        """The arrays [N, ...], bfloat16 as bit patterns. They are valid until `release`."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [_to_numpy(tensor) for tensor in self._tensors]

    def release(self) -> None:
        """Gives the memory back for the next batch."""
        if self._buffers is not None:
            self._buffers.put(self._buffer)


class HostCopier:
    """Starts copies. On the CPU there is nothing to copy; on CUDA they run on a stream of their own."""

    def __init__(self, device: torch.device, *, max_tokens: int) -> None:
        """`max_tokens`: most tokens of a batch without padding; pinned buffers have this many rows."""
        cuda: Any = torch.cuda  # its constructors carry no types
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._max_tokens = max_tokens
        self._buffers: queue.Queue[list[Tensor] | None] = queue.Queue()
        for _ in range(_NUM_BUFFERS):
            self._buffers.put(None)  # pinned when first used: a short run needs only one

    def start(self, arrays: Sequence[Tensor]) -> HostCopy:
        """Begins to copy [N, ...] of each array; shapes of rows and types are the same every time.

        Waits while all buffers are in use.
        """
        if self._stream is None:
            return HostCopy(arrays)
        buffer = self._buffers.get()
        if buffer is None:
            buffer = [
                torch.empty((self._max_tokens, *array.shape[1:]), dtype=array.dtype, pin_memory=True)
                for array in arrays
            ]
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        targets = [rows[: len(array)] for rows, array in zip(buffer, arrays, strict=True)]
        with torch.cuda.stream(self._stream):
            for target, array in zip(targets, arrays, strict=True):
                target.copy_(array, non_blocking=True)
                array.record_stream(self._stream)  # its memory must not be reused before the copy is done
            arrived = self._stream.record_event()
        return HostCopy(targets, arrived, self._buffers, buffer)


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
