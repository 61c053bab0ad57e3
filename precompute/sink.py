"""The thread that checks, encodes and writes finished batches while the target computes the next ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import teacher_arrays
from cache_tools.errors import TargetError
from cache_tools.integrity import CONSTANT, find_bad_layer
from cache_tools.reader import Store
from cache_tools.writer import ShardWriter
from precompute.encoding import by_layer
from precompute.teacher import find_bad_teacher
from precompute.transfer import HostCopy

_WAITING_BATCHES = 1


@dataclass(frozen=True)
class FinishedBatch:
    """Consecutive samples of one shard: their tapped layers, these quantised, and the arrays of their teacher."""

    shard: int
    samples: range
    states: HostCopy


class ShardSink(AbstractContextManager["ShardSink"]):
    """Takes the batches of whole shards in order and seals each shard behind its last sample.

    `done` is called in the writing thread with the number of tokens of each batch that was taken in.
    """

    def __init__(
        self, store: Store, *, on_bad: Literal["fail", "skip"], num_threads: int, done: Callable[[int], None]
    ) -> None:
        self._store, self._on_bad, self._done = store, on_bad, done
        self._pool = ThreadPoolExecutor(num_threads, "shard-sink") if num_threads > 1 else None
        self._queue: queue.Queue[FinishedBatch | None] = queue.Queue(_WAITING_BATCHES)
        self._error: BaseException | None = None
        self._cancelled = False
        self._writer: ShardWriter | None = None  # of the shard that is being written
        self._thread = threading.Thread(target=self._work, name="shard-sink", daemon=True)
        self._thread.start()

    def put(self, batch: FinishedBatch) -> None:
        """Hands over a batch; waits while the writer is behind. Raises what the writer has raised."""
        self._queue.put(batch)
        if self._error is not None:
            raise self._error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cancelled = kind is not None
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                if self._error is None and not self._cancelled:
                    self._write(batch)
            except BaseException as error:  # raised again by the thread that computes
                self._error = error
            finally:
                batch.states.release()
        if self._writer is not None:
            self._writer.__exit__(None, None, None)  # not sealed: leaves nothing behind
        if self._pool is not None:
            self._pool.shutdown()

    def _write(self, batch: FinishedBatch) -> None:
        """Takes in one batch, and seals its shard if it is the last one of it."""
        if self._writer is None:
            store = self._store
            self._writer = ShardWriter(store.path, store.manifest, batch.shard, store.samples, self._pool)
        writer = self._writer
        arrays = batch.states.wait()
        first = 0
        for sample in batch.samples:
            end = first + int(self._store.samples.length[sample])
            self._take_in(writer, sample, [array[first:end] for array in arrays])
            first = end
        if batch.samples.stop == writer.samples.stop:
            writer.seal()
            writer.__exit__(None, None, None)
            self._writer = None
        self._done(first)

    def _take_in(self, writer: ShardWriter, sample: int, arrays: list[NDArray[Any]]) -> None:
        manifest = self._store.manifest
        names = list(teacher_arrays(manifest))
        end_of_layers, end_of_encoded = len(manifest.layer_ids), len(arrays) - len(names)
        by_id: dict[int, NDArray[np.uint16]] = dict(zip(manifest.layer_ids, arrays[:end_of_layers], strict=True))
        encoded = by_layer(manifest, arrays[end_of_layers:end_of_encoded])
        teacher = dict(zip(names, arrays[end_of_encoded:], strict=True))
        unusable = self._unusable(sample, by_id, teacher)
        if unusable is None:
            writer.append(sample, by_id, teacher, encoded)
            return
        layer_id, reason = unusable
        if self._on_bad == "fail":
            source = manifest.data.sources[int(self._store.samples.source[sample])].name
            raise TargetError(
                f"the target gave unusable hidden states for sample {sample}, layer {layer_id}: {reason}",
                where=f"{source}:{int(self._store.samples.row[sample]) + 1}",
                fix="check the target, its precision and attention; --on-bad skip leaves such samples out",
            )
        writer.reject(sample, layer_id, reason)

    def _unusable(
        self, sample: int, layers: dict[int, NDArray[np.uint16]], teacher: dict[str, NDArray[Any]]
    ) -> tuple[int, str] | None:
        """The first layer that is unusable, and why; the target's last one if its prediction is."""
        for layer_id, reason in zip(layers, self._reasons(list(layers.values())), strict=True):
            if reason is not None and not (reason == CONSTANT and self._is_one_token(sample)):
                return layer_id, reason
        reason = find_bad_teacher(teacher)
        return None if reason is None else (self._store.manifest.target.num_layers - 1, reason)

    def _reasons(self, layers: list[NDArray[np.uint16]]) -> list[str | None]:
        """Why each layer is unusable, if it is."""
        return (
            [find_bad_layer(bits) for bits in layers]
            if self._pool is None
            else list(self._pool.map(find_bad_layer, layers))
        )

    def _is_one_token(self, sample: int) -> bool:
        """Whether a sample is one token again and again.

        Attention then averages equal values, whatever its weights, so equal states are what the target must give.
        """
        ids, _ = self._store.read_tokens(sample)
        return bool((ids == ids[0]).all())
