"""What one process does: run the target over the shards it was given."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from cache_tools.errors import DflashError, TargetError
from cache_tools.manifest import TargetAttributes
from cache_tools.reader import Store
from cache_tools.writer import write_target
from precompute.batching import plan_batches
from precompute.calibration import await_scales, calibrate
from precompute.encoding import encoded_layers
from precompute.sink import FinishedBatch, ShardSink
from precompute.target import Target
from precompute.teacher import kept_layers, teacher_rows, token_ids
from precompute.transfer import HostCopier

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True, kw_only=True)
class Job:
    """The part of the work that one worker does."""

    store: Path
    target: Path
    shards: tuple[int, ...]
    writes_target: bool  # whether this worker stores the target's embedding, head and norm
    calibrates: bool  # whether this worker finds the channel scales that the others wait for
    dtype: str
    attention: str
    device: str
    batch_tokens: int
    num_threads: int
    on_bad: Literal["fail", "skip"]


@dataclass(frozen=True)
class WorkDone:
    """Sent after each batch."""

    tokens: int
    waited_seconds: float  # that the target stood still because writing was behind


def run_job(job: Job, report: Callable[[WorkDone], None]) -> None:
    """Computes, writes and seals the job's shards. Raises TargetError or StoreError."""
    torch.set_num_threads(job.num_threads)
    store, device = Store.open(job.store), torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # pinned memory belongs to the current device's context
    target = Target.load(
        job.target, layer_ids=kept_layers(store.manifest), dtype=job.dtype, attention=job.attention, device=device
    )
    batches = [batch for shard in job.shards for batch in _shard_batches(store, shard, job.batch_tokens)]
    try:
        if device.type == "cuda" and batches:
            _try_largest(store, target, [samples for _, samples in batches])
        if job.writes_target:
            _store_parts(store, target)
        if job.calibrates:
            calibrate(store, target)
        elif job.shards:
            await_scales(store)
        _compute(job, store, target, batches, report)
    except torch.cuda.OutOfMemoryError as error:
        raise TargetError(
            "the GPU's memory is too small for a batch",
            where=job.device,
            got=error,
            fix=f"pass a smaller --batch-tokens than {job.batch_tokens}, or a smaller --max-length",
        ) from error


def work_for_parent(job: Job, lock: Any, connection: Connection) -> None:
    """The main function of a worker process: like `run_job`, but sends progress and errors to its parent.

    `lock`: a duplicate of the store's lock, kept until this process ends.
    """
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    lock.detach()
    try:
        run_job(job, connection.send)
    except DflashError as error:
        connection.send(_plain(error))


def _compute(
    job: Job,
    store: Store,
    target: Target,
    batches: list[tuple[int, range]],
    report: Callable[[WorkDone], None],
) -> None:
    most_tokens = max((_num_tokens(store, samples) for _, samples in batches), default=0)
    copier = HostCopier(torch.device(job.device), max_tokens=most_tokens)
    waited = 0.0
    reported = 0.0

    def done(tokens: int) -> None:
        nonlocal reported
        report(WorkDone(tokens, waited - reported))
        reported = waited

    with ShardSink(store, on_bad=job.on_bad, num_threads=job.num_threads, done=done) as sink:
        for shard, samples in batches:
            tokens = [store.read_tokens(sample) for sample in samples]
            kept = target.hidden_states([ids for ids, _ in tokens])
            taps = kept[: len(store.layer_ids)]
            teacher = teacher_rows(store, target, [mask for _, mask in tokens], kept[-1])
            arrays = taps + encoded_layers(store, taps) + teacher
            before = time.monotonic()
            sink.put(FinishedBatch(shard, samples, copier.start(arrays)))
            waited += time.monotonic() - before


def _shard_batches(store: Store, shard: int, batch_tokens: int) -> list[tuple[int, range]]:
    samples = store.shard_samples(shard)
    lengths = store.samples.length[samples.start : samples.stop].tolist()
    return [
        (shard, range(samples.start + batch.start, samples.start + batch.stop))
        for batch in plan_batches(lengths, batch_tokens)
    ]


def _try_largest(store: Store, target: Target, batches: list[range]) -> None:
    """Runs the batch with the most padded tokens, so that memory runs out now or never."""
    lengths = store.samples.length
    largest = max(batches, key=lambda b: (len(b) * int(lengths[b.start : b.stop].max()), int(lengths[b.stop - 1])))
    target.hidden_states(token_ids(store, largest))


def _num_tokens(store: Store, samples: range) -> int:
    return int(store.samples.length[samples.start : samples.stop].sum())


def _store_parts(store: Store, target: Target) -> None:
    parts = target.parts()
    arrays = {"embed_tokens": parts.embed_tokens, "final_norm": parts.final_norm}
    if parts.lm_head is not None:
        arrays["lm_head"] = parts.lm_head
    attributes = TargetAttributes(
        tied=parts.lm_head is None,
        norm_eps=parts.norm_eps,
        norm_kind=parts.norm_kind,
        hidden_size=parts.embed_tokens.shape[1],
        vocab_size=parts.embed_tokens.shape[0],
    )
    write_target(store.path, arrays, attributes)


def _die_with_parent() -> None:
    """Asks the kernel (Linux) to kill this process when its parent dies, so that nobody writes without a command."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _plain(error: DflashError) -> DflashError:
    """The same error with nothing in it that might not travel between processes."""
    where, got, expected = (None if v is None else str(v) for v in (error.where, error.got, error.expected))
    return type(error)(error.what, where=where, got=got, expected=expected, fix=error.fix)
