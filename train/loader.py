"""From the store to packs on their way to the drafter, read ahead by plan."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cache_tools.errors import ConfigError, StoreError
from cache_tools.packs import PackCursor, PackPlan
from cache_tools.reader import Store
from cache_tools.strategies import plan_for
from train.batches import LoaderStats, Pack, StepBatch
from train.read_ahead import ReadAhead

__all__ = ["Loader", "LoaderStats", "Pack", "StepBatch"]


class Loader:
    """An endless iterator of `StepBatch`, read ahead by background threads.

    The packs of a step lie in buffers that are used again: asking for the next step gives the buffers of the
    previous one back, so copy what must live longer (to the GPU, usually) before. At most the buffers of one step
    plus `prefetch_bytes` (at least one pack) are allocated. `close()`, or losing the last reference, stops the threads.
    """

    def __init__(
        self,
        store: Store,
        plan: PackPlan,
        *,
        layer_ids: Sequence[int],
        rank: int = 0,
        world_size: int = 1,
        start_state: Mapping[str, int | str] | None = None,
        prefetch_bytes: int,
        num_threads: int,
        skip_unreadable: bool = False,
        with_teacher: bool = False,
    ) -> None:
        """
        Args:
            plan: packs of samples of the store, as `pack_plan` makes them.
            start_state: `StepBatch.state` of the last step done, by any number of ranks.
            skip_unreadable: deliver a sample that cannot be read as zeros without loss, instead of raising.
            with_teacher: packs carry what the store holds of the target's prediction.

        Raises:
            StoreError: the store is incomplete or lacks a layer.
            ConfigError: `start_state` belongs to another data order.
        """
        assert 0 <= rank < world_size and num_threads >= 1
        store.require_complete()
        missing = [layer for layer in layer_ids if layer not in store.layer_ids]
        if missing:
            raise StoreError(
                "The store does not hold every layer asked for.",
                where=store.path,
                got=f"layer ids {list(layer_ids)}",
                expected=f"some of {list(store.layer_ids)}",
                fix="choose among the stored layers, or precompute a store that has them",
            )
        cursor = PackCursor() if start_state is None else plan.resume(start_state)
        self._read_ahead = ReadAhead(
            store, plan, layer_ids, rank, world_size, prefetch_bytes, skip_unreadable, with_teacher
        )
        weakref.finalize(self, self._read_ahead.close)
        self._read_ahead.start(cursor, num_threads)

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        """The next step. Raises what went wrong in a thread when its step is reached; ends once closed."""
        try:
            batch = self._read_ahead.take()
        except BaseException:
            self.close()
            raise
        if batch is None:
            raise StopIteration
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def stats(self) -> LoaderStats:
        return self._read_ahead.stats()

    def close(self) -> None:
        """Stop the threads and wait for them; may be called twice. Packs in the consumer's hands stay readable."""
        self._read_ahead.close()
        self._read_ahead.join()


def pack_plan(
    store: Store,
    *,
    seed: int,
    token_budget: int,
    packs_per_step: int,
    samples: NDArray[np.int64] | None = None,
    order: str = PackPlan.strategy,
) -> PackPlan:
    """What a `Loader` of the store follows.

    samples: one epoch's samples, a number as often as it comes; default each once. Rejected ones are always left out.
    order: how samples are batched, a name that `plan_for` knows.

    Raises ConfigError: a sample exceeds the token budget or is not in the store, nothing is left to train on, or
    `order` is unknown.
    """
    chosen = _usable(store, samples)
    return plan_for(
        order,
        store.samples.length[chosen],
        seed=seed,
        token_budget=token_budget,
        packs_per_step=packs_per_step,
        samples=None if np.array_equal(chosen, np.arange(store.num_samples)) else chosen,
        supervised=store.samples.supervised[chosen],
        identity=store.samples.content_id[chosen].tobytes(),
    )


def _usable(store: Store, samples: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Ascending numbers of the wanted samples that were not rejected, each as often as it is wanted."""
    wanted = np.arange(store.num_samples) if samples is None else np.sort(samples)
    if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < store.num_samples:
        raise ConfigError(
            "There is no such sample in the store.",
            where=store.path,
            got=f"samples {wanted[0]} to {wanted[-1]}",
            expected=f"0 to {store.num_samples - 1}",
        )
    return store.without_rejected(wanted)
