"""How fast this machine reads a store in the order of training: packs of a global shuffle, read by several threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_tools import page_cache
from cache_tools.arrays import ArraySpec, hidden_arrays, teacher_arrays, token_arrays
from cache_tools.errors import StoreError
from cache_tools.files import file_size, reading
from cache_tools.packs import PackCursor
from cache_tools.quantise import QUANTISED
from cache_tools.reader import Store
from cache_tools.strategies import plan_for

GPU_TOKENS_PER_S: Final = 20_000
"""What one GPU is taken to train, for examples/qwen3.6-27b: a pack of 24,576 tokens with 1,024 blocks of 16 costs about
0.25 TFLOP per block and 0.001 per token, 280 in all. At 35 % of the 989 TFLOP/s of an H100 that is 30,000 tokens/s;
a third less is assumed. Arithmetic, not a measurement."""

_MOST_FILES: Final = 500
"""Files whose share in the page cache is looked up; evenly chosen when there are more."""


@dataclass(frozen=True)
class ReadingSpeed:
    """What was measured."""

    seconds: float
    samples: int
    tokens: int
    bytes_per_token: float
    """Bytes of the files that were read (tokens, hidden states, the teacher's arrays), per token."""
    with_teacher: bool
    """What the store holds of the target's prediction was read too."""
    p50_ms: float
    """Milliseconds to read one sample, as one of several threads sees it."""
    p99_ms: float
    cold: bool
    """The files were dropped from the page cache before, as far as the kernel let go of them."""
    cached_before: float | None
    """Share of the files that the page cache held before; None when the kernel tells only their owner."""
    cached_after: float | None
    direct: bool
    """Large reads went past the page cache, see `Store.direct`."""
    whole_store: bool
    """Every sample was read once, sooner than `seconds` asked for."""
    gpu_tokens_per_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def gb_per_s(self) -> float:
        """Of the files."""
        return self.tokens_per_s * self.bytes_per_token / 1e9

    @property
    def gpus(self) -> float:
        """GPUs that this feeds, each training `gpu_tokens_per_s`."""
        return self.tokens_per_s / self.gpu_tokens_per_s

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "tokens_per_s": self.tokens_per_s,
            "gb_per_s": self.gb_per_s,
            "gpus": self.gpus,
        }


def measure(
    store: Store,
    *,
    layer_ids: Sequence[int] | None = None,
    with_teacher: bool = True,
    seconds: float,
    num_threads: int,
    token_budget: int,
    cold: bool = False,
    gpu_tokens_per_s: float = GPU_TOKENS_PER_S,
    seed: int = 0,
) -> ReadingSpeed:
    """Reads whole samples for so many seconds, or every sample once.

    Quantised hidden states are read as training reads them, undecoded. `with_teacher`: so is what the store holds of
    the target's prediction, if it holds any. `cold`: drops the files from the page cache before. Raises ConfigError
    when a sample exceeds the token budget, StoreError, CorruptError.
    """
    store.require_complete()
    assert num_threads >= 1 and seconds > 0 and gpu_tokens_per_s > 0
    layers = list(store.layer_ids if layer_ids is None else layer_ids)
    teacher = teacher_arrays(store.manifest) if with_teacher else {}
    files = _files(store, layers, teacher)
    with reading(store.path):
        if cold:
            page_cache.drop(files)
        before = _cached_share(files)
    work = _Work(store, layers, _order(store, token_budget, seed), seconds)
    work.run([_SampleReader(store, layers, teacher) for _ in range(num_threads)])
    with reading(store.path):
        after = _cached_share(files)
    times = np.array(work.times) * 1e3
    return ReadingSpeed(
        seconds=work.wall_seconds,
        samples=len(times),
        tokens=work.num_tokens,
        bytes_per_token=sum(map(file_size, files)) / store.num_tokens,
        p50_ms=float(np.percentile(times, 50)),
        p99_ms=float(np.percentile(times, 99)),
        with_teacher=bool(teacher),
        cold=cold,
        cached_before=before,
        cached_after=after,
        direct=store.direct,
        whole_store=work.is_done,
        gpu_tokens_per_s=gpu_tokens_per_s,
    )


def report_lines(speed: ReadingSpeed) -> list[str]:
    """For people: what was measured, what it is good for, and what the page cache had to do with it."""
    return [
        f"read        {speed.samples:,} samples, {speed.tokens:,} tokens in {speed.seconds:.1f} s"
        + (": the whole store" if speed.whole_store else "")
        + (", with the teacher's arrays" if speed.with_teacher else ""),
        f"speed       {speed.tokens_per_s / 1e3:,.1f} Ktok/s, {speed.gb_per_s:.2f} GB/s of files",
        f"per sample  {speed.p50_ms:.1f} ms (median), {speed.p99_ms:.1f} ms (99 %)",
        f"feeds       {speed.gpus:.1f} GPUs that train {speed.gpu_tokens_per_s / 1e3:,.0f} Ktok/s each",
        _cache_line(speed),
    ]


def _cache_line(speed: ReadingSpeed) -> str:
    past = "; large reads go past it where that can be done: the store may exceed half of the memory"
    return _share_held(speed) + (past if speed.direct else "")


def _share_held(speed: ReadingSpeed) -> str:
    if speed.cached_before is None:
        return "page cache  unknown: the files belong to somebody else. Repeated runs may be faster than the disk"
    line = f"page cache  held {speed.cached_before:.0%} of the files before, {speed.cached_after:.0%} after"
    if speed.cached_before < 0.05:
        return f"{line}: this is the speed of the disk"
    if speed.cold:
        return f"{line}: memory answered, not only the disk; --cold cannot drop what is in use or on a disk in memory"
    return f"{line}: memory answered, not only the disk; --cold drops the files first"


class _Work:
    """Threads that read the next sample of the order until time is up; each reads one at least."""

    def __init__(self, store: Store, layers: list[int], order: Iterator[int], seconds: float) -> None:
        self._store, self._layers, self._order, self._seconds = store, layers, order, seconds
        self._lock = threading.Lock()
        self._errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._deadline = 0.0
        self.times: list[float] = []
        self.num_tokens = 0
        self.wall_seconds = 0.0
        self.is_done = False

    def run(self, readers: Sequence[_SampleReader]) -> None:
        """One thread for each reader. Raises what went wrong in a thread."""
        threads = [threading.Thread(target=self._read, args=(reader,), daemon=True) for reader in readers]
        begin = time.perf_counter()
        self._deadline = begin + self._seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.wall_seconds = time.perf_counter() - begin
        if not self._errors.empty():
            raise self._errors.get()

    def _read(self, reader: _SampleReader) -> None:
        try:
            while self._errors.empty():
                with self._lock:
                    sample = next(self._order, None)
                if sample is None:
                    self.is_done = True
                    return
                begin = time.perf_counter()
                num_tokens = reader.read(sample)
                seconds = time.perf_counter() - begin
                with self._lock:
                    self.times.append(seconds)
                    self.num_tokens += num_tokens
                if begin + seconds >= self._deadline:
                    return
        except BaseException as error:  # raised by `run`
            self._errors.put(error)


class _SampleReader:
    """Reads a sample as training does, into memory that is used again."""

    def __init__(self, store: Store, layers: list[int], teacher: Mapping[str, ArraySpec]) -> None:
        """`teacher`: the arrays of the target's prediction; empty when they are not to be read."""
        self._store, self._layers = store, layers
        self._longest = int(store.samples.length.max())
        # Ones: its pages are there before the clock starts.
        self._teacher = {name: self._ones(self._longest, array) for name, array in teacher.items()}
        if store.manifest.codec in QUANTISED:
            self._parts = [self._room(layer) for layer in layers]
        else:
            self._bits = np.ones((len(layers), self._longest, store.hidden_size), np.uint16)

    def read(self, sample: int) -> int:
        """Returns the number of tokens. Raises StoreError, CorruptError."""
        length = len(self._store.read_tokens(sample)[0])
        if self._teacher:
            for name, values in self._store.read_teacher(sample).items():
                self._teacher[name][:length] = values
        if self._store.manifest.codec not in QUANTISED:
            self._store.read_hidden(sample, self._layers, out=self._bits[:, :length].transpose(1, 0, 2))
            return length
        for layer, parts in zip(self._layers, self._parts, strict=True):
            out = {name: part[:length] for name, part in parts.items()}
            self._store.read_parts(sample, layer, out)
        return length

    def _room(self, layer: int) -> dict[str, NDArray[Any]]:
        return {
            name: self._ones(1 if name == "first" else self._longest, array)
            for name, array in hidden_arrays(self._store.manifest, layer).items()
        }

    @staticmethod
    def _ones(num_rows: int, array: ArraySpec) -> NDArray[Any]:
        return np.ones((num_rows, *array.shape[1:]), array.dtype)


def _order(store: Store, token_budget: int, seed: int) -> Iterator[int]:
    """Samples of one epoch, pack after pack."""
    readable = store.without_rejected()
    if len(readable) == 0:
        raise StoreError("every sample of the store was rejected", where=store.path)
    plan = plan_for(
        "global",
        store.samples.length[readable],
        seed=seed,
        token_budget=token_budget,
        packs_per_step=1,
        samples=readable,
    )
    left, cursor = len(readable), PackCursor()
    while left > 0:
        packs, cursor = plan.step(cursor)
        yield from packs[0][:left].tolist()
        left -= len(packs[0])


def _files(store: Store, layers: list[int], teacher: Mapping[str, ArraySpec]) -> list[Path]:
    """The objects of the tokens, of the hidden states of these layers, and of the teacher."""
    hidden = [array for layer in layers for array in hidden_arrays(store.manifest, layer).values()]
    arrays = [*token_arrays(store.manifest), *hidden, *teacher.values()]
    return [store.path / array.object_path(shard) for array in arrays for shard in range(store.num_shards)]


def _cached_share(files: list[Path]) -> float | None:
    if not page_cache.can_tell(files[0]):
        return None
    return page_cache.cached_share(files[:: -(-len(files) // _MOST_FILES)])
