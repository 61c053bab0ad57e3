"""The threads behind the loader: a planner that walks the steps, readers that fill packs sample by sample.

The plan of packs is known far ahead, so nothing here decides an order. Thread counts and read-ahead change when a
sample is read, never what a step holds.

Letters as in `batches`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.arrays import teacher_arrays
from cache_tools.errors import StoreError
from cache_tools.packs import PackCursor, PackPlan
from cache_tools.quantise import QUANTISED
from cache_tools.reader import Store
from train.batches import LoaderStats, Pack, StepBatch, TeacherRows
from train.tapped import LOSSLESS_PART, PackBuffer, TappedStates, as_tensors, bytes_per_token

# A rank that never gets a pack would otherwise plan without end.
_MAX_STEPS_AHEAD: Final = 64


@dataclass(eq=False)
class _OpenPack:
    """A pack that is being read."""

    samples: NDArray[np.int64]  # [D]
    offsets: NDArray[np.int64]  # [D + 1]
    buffer: PackBuffer
    parts: dict[str, NDArray[np.generic]]  # [F, T, ...], in the buffer
    first: NDArray[np.uint16] | None  # [F, D, H], exact first rows where the parts do not hold them
    input_ids: NDArray[np.int64]  # [T]
    loss_mask: NDArray[np.bool_]  # [T]
    teacher: dict[str, NDArray[np.generic]]  # [T, ...] by the names of `teacher_arrays`; empty unless asked for
    num_missing: int  # samples not read yet
    errors: dict[int, BaseException] = field(default_factory=dict)  # by position in the pack
    unreadable: dict[int, BaseException] = field(default_factory=dict)  # by sample

    def finish(self, codec: str, channel_scale: Tensor | None) -> Pack:
        num_tokens = len(self.input_ids)
        starts = np.repeat(self.offsets[:-1], np.diff(self.offsets))
        return Pack(
            samples=tuple(self.samples.tolist()),
            cu_seqlens=torch.from_numpy(self.offsets.astype(np.int32)),
            input_ids=torch.from_numpy(self.input_ids),
            loss_mask=torch.from_numpy(self.loss_mask),
            positions=torch.from_numpy(np.arange(num_tokens) - starts),
            tapped=TappedStates(
                codec=codec,
                parts=as_tensors(self.parts),
                first_rows=torch.from_numpy(self.offsets[:-1]),
                first=None if self.first is None else torch.from_numpy(self.first.view(np.int16)).view(torch.bfloat16),
                channel_scale=channel_scale,
            ),
            teacher=TeacherRows.of_store(self.teacher) if self.teacher else None,
        )


@dataclass(frozen=True)
class _OpenStep:
    """A step whose packs are being read."""

    step: int
    epoch: float
    packs: list[_OpenPack]
    supervised: int
    tokens: int
    samples: NDArray[np.int64]  # of all ranks
    state: dict[str, int | str]


class ReadAhead:
    """The threads and what they share. Knows nothing of the loader, so that a forgotten loader can be collected.

    Every field from `_steps` on is guarded by `_changed`. Buffers: enough for the step in the consumer's hands
    and at least one more, so that whoever waits, another can go on.
    """

    def __init__(
        self,
        store: Store,
        plan: PackPlan,
        layer_ids: Sequence[int],
        rank: int,
        world_size: int,
        prefetch_bytes: int,
        skip_unreadable: bool,
        with_teacher: bool,
    ) -> None:
        self._store, self._plan, self._layer_ids = store, plan, list(layer_ids)
        self._rank, self._world_size = rank, world_size
        self._skip_unreadable = skip_unreadable
        self._teacher_arrays = teacher_arrays(store.manifest) if with_teacher else {}
        self._lengths = store.samples.length
        self._supervised = store.samples.supervised
        self._codec = store.manifest.codec
        self._channel_scale = _channel_scale(store, self._layer_ids)
        self._row_bytes = bytes_per_token(self._codec, len(self._layer_ids), store.hidden_size)
        packs_of_step = -(-plan.packs_per_step // world_size)
        self._max_buffers = packs_of_step + max(1, prefetch_bytes // (plan.token_budget * self._row_bytes))

        self._changed = threading.Condition()
        self._steps: deque[_OpenStep] = deque()
        self._unread: deque[tuple[_OpenPack, int]] = deque()
        self._free: list[PackBuffer] = []
        self._num_buffers = 0
        self._held: list[PackBuffer] = []
        self._plan_error: BaseException | None = None
        self._closed = False
        self._packs_read = self._samples_read = self._retries = self._read_bytes = 0
        self._packs_taken = self._samples_taken = 0
        self._wait_seconds = 0.0
        self._threads: list[threading.Thread] = []

    def start(self, cursor: PackCursor, num_threads: int) -> None:
        jobs: list[Callable[[], None]] = [lambda: self._run_planner(cursor)] + [self._run_reader] * num_threads
        for i, job in enumerate(jobs):
            name = "loader-planner" if i == 0 else f"loader-reader-{i - 1}"
            thread = threading.Thread(target=job, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def take(self) -> StepBatch | None:
        """The next step, as soon as it is complete; None when closed. Gives the previous step's buffers back."""
        begin = time.monotonic()
        with self._changed:
            self._free += self._held
            self._held = []
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._next_is_complete())
            self._wait_seconds += time.monotonic() - begin
            if self._closed:
                return None
            if not self._steps:
                assert self._plan_error is not None
                raise self._plan_error
            step = self._steps.popleft()
            self._held = [pack.buffer for pack in step.packs]
            self._packs_taken += len(step.packs)
            self._samples_taken += sum(len(pack.samples) for pack in step.packs)
            self._changed.notify_all()
        for pack in step.packs:
            self._raise_first_error(pack)
        return StepBatch(
            step=step.step,
            epoch=step.epoch,
            packs=[pack.finish(self._codec, self._channel_scale) for pack in step.packs],
            supervised=step.supervised,
            tokens=step.tokens,
            samples=step.samples,
            unreadable={sample: error for pack in step.packs for sample, error in pack.unreadable.items()},
            state=step.state,
        )

    def _next_is_complete(self) -> bool:
        if not self._steps:
            return self._plan_error is not None
        return all(pack.num_missing == 0 for pack in self._steps[0].packs)

    def _raise_first_error(self, pack: _OpenPack) -> None:
        if not pack.errors:
            return
        position = min(pack.errors)
        error = pack.errors[position]
        if isinstance(error, OSError):
            raise StoreError(
                "A sample could not be read, at the second attempt either.",
                where=f"{self._store.path}, sample {pack.samples[position]}",
                got=error,
                fix="check that the disk is mounted and healthy, then run the same command again to resume",
            ) from error
        raise error

    def stats(self) -> LoaderStats:
        with self._changed:
            return LoaderStats(
                packs_read=self._packs_read,
                read_bytes=self._read_bytes,
                wait_seconds=self._wait_seconds,
                retries=self._retries,
                q_read=self._samples_read - self._samples_taken,
                q_pack=self._packs_read - self._packs_taken,
            )

    def _run_planner(self, cursor: PackCursor) -> None:
        try:
            while True:
                packs, after = self._plan.step(cursor)
                opened = self._open_packs(packs[self._rank :: self._world_size])
                if opened is None or not self._publish(self._describe(cursor, packs, opened, after)):
                    return
                cursor = after
        except BaseException as error:  # handed to the consumer
            with self._changed:
                self._plan_error = error
                self._changed.notify_all()

    def _publish(self, step: _OpenStep) -> bool:
        """Append the step to what the consumer will get; False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._steps) < _MAX_STEPS_AHEAD)
            self._steps.append(step)
            self._changed.notify_all()
            return not self._closed

    def _describe(
        self, cursor: PackCursor, packs: list[NDArray[np.int64]], opened: list[_OpenPack], after: PackCursor
    ) -> _OpenStep:
        whole = np.concatenate(packs)
        return _OpenStep(
            step=cursor.step,
            epoch=self._plan.epochs_done(after),
            packs=opened,
            supervised=int(self._supervised[whole].sum()),
            tokens=int(self._lengths[whole].sum()),
            samples=whole,
            state=self._plan.state(after),
        )

    def _open_packs(self, packs: list[NDArray[np.int64]]) -> list[_OpenPack] | None:
        """Hand samples to the readers, pack by pack as buffers become free; None when closed."""
        opened = []
        for samples in packs:
            buffer = self._free_buffer()
            if buffer is None:
                return None
            opened.append(self._open_pack(samples, buffer))
        return opened

    def _open_pack(self, samples: NDArray[np.int64], buffer: PackBuffer) -> _OpenPack:
        offsets = np.concatenate([[0], np.cumsum(self._lengths[samples])]).astype(np.int64)
        num_tokens = int(offsets[-1])
        pack = _OpenPack(
            samples=samples,
            offsets=offsets,
            buffer=buffer,
            parts=buffer.views(num_tokens),
            first=self._room_for_first(len(samples)),
            input_ids=np.empty(num_tokens, np.int64),
            loss_mask=np.empty(num_tokens, np.bool_),
            teacher={
                name: np.empty((num_tokens, *array.shape[1:]), array.dtype)
                for name, array in self._teacher_arrays.items()
            },
            num_missing=len(samples),
        )
        # Neighbours in the store one after the other, so that the disk sees one long read.
        in_store_order = np.argsort(samples, kind="stable").tolist()
        with self._changed:
            self._unread += [(pack, position) for position in in_store_order]
            self._changed.notify_all()
        return pack

    def _room_for_first(self, num_samples: int) -> NDArray[np.uint16] | None:
        if self._channel_scale is None:
            return None
        return np.empty((len(self._layer_ids), num_samples, self._store.hidden_size), np.uint16)

    def _free_buffer(self) -> PackBuffer | None:
        """A buffer nobody uses, waiting for one if need be; None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._free or self._num_buffers < self._max_buffers)
            if self._closed:
                return None
            if self._free:
                return self._free.pop()
            self._num_buffers += 1
        return PackBuffer(self._plan.token_budget, len(self._layer_ids), self._store.hidden_size, self._codec)

    def _run_reader(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._unread)
                if self._closed:
                    return
                pack, position = self._unread.popleft()
            self._read_sample(pack, position)

    def _read_sample(self, pack: _OpenPack, position: int) -> None:
        """Read one sample into its rows of the pack. A transient fault of the disk gets a second attempt.

        If that fails too, the sample's place may stay empty: the pack and all that was planned keep their shape.
        """
        error: BaseException | None = None
        retried = False
        try:
            try:
                self._fill(pack, position)
            except (StoreError, OSError):
                retried = True
                self._fill(pack, position)
        except BaseException as caught:  # handed to the consumer
            error = caught
        if self._skip_unreadable and isinstance(error, StoreError | OSError):
            self._leave_empty(pack, position)
            pack.unreadable[int(pack.samples[position])] = error
            error, retried = None, False
        with self._changed:
            if error is not None:
                pack.errors[position] = error
            elif retried:
                self._retries += 1
            pack.num_missing -= 1
            self._samples_read += 1
            self._packs_read += pack.num_missing == 0
            self._read_bytes += int(pack.offsets[position + 1] - pack.offsets[position]) * self._row_bytes
            if pack.num_missing == 0:
                self._changed.notify_all()

    def _leave_empty(self, pack: _OpenPack, position: int) -> None:
        """Zeros that carry no loss in the place of one sample. No other sample of the pack sees them."""
        rows = _rows(pack, position)
        pack.input_ids[rows], pack.loss_mask[rows] = 0, False
        for part in pack.parts.values():
            part[:, rows] = np.zeros((), part.dtype)
        for values in pack.teacher.values():
            values[rows] = np.zeros((), values.dtype)
        if pack.first is not None:
            pack.first[:, position] = 0

    def _fill(self, pack: _OpenPack, position: int) -> None:
        sample = int(pack.samples[position])
        rows = _rows(pack, position)
        pack.input_ids[rows], pack.loss_mask[rows] = self._store.read_tokens(sample)
        if pack.teacher:
            for name, values in self._store.read_teacher(sample).items():
                pack.teacher[name][rows] = values
        if pack.first is None:
            bits = pack.parts[LOSSLESS_PART].view(np.uint16)
            self._store.read_hidden(sample, self._layer_ids, out=bits[:, rows].transpose(1, 0, 2))
            return
        for i, layer_id in enumerate(self._layer_ids):
            out: dict[str, NDArray[Any]] = {name: part[i, rows] for name, part in pack.parts.items()}
            out["first"] = pack.first[i, position : position + 1]
            self._store.read_parts(sample, layer_id, out)


def _channel_scale(store: Store, layer_ids: Sequence[int]) -> Tensor | None:
    """float32 [F, H] of a quantised store. Raises StoreError, CorruptError."""
    if store.manifest.codec not in QUANTISED:
        return None
    return torch.from_numpy(np.stack([store.channel_scales[layer_id] for layer_id in layer_ids]))


def _rows(pack: _OpenPack, position: int) -> slice:
    """Rows of the pack that one of its samples fills."""
    return slice(int(pack.offsets[position]), int(pack.offsets[position + 1]))
