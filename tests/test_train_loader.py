"""The loader delivers what the plan says, in order, whatever its threads do, and never hangs."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.errors import ConfigError, CorruptError, StoreError
from cache_tools.packs import PackCursor, PackPlan
from cache_tools.reader import Store
from cache_tools.synthetic import make_store
from train.loader import Loader, Pack, StepBatch, pack_plan

LENGTHS = [5, 17, 3, 30, 12, 9, 24, 7, 11, 20, 4, 15, 28, 6, 13, 10]
BUDGET = 40
LAYERS = (3, 1)
HIDDEN = 8
PACK_BYTES = BUDGET * len(LAYERS) * HIDDEN * 2


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loader") / "s.zarr"
    make_store(path, LENGTHS, hidden_size=HIDDEN, layer_ids=(1, 2, 3))
    return path


@pytest.fixture
def store(store_path: Path) -> Store:
    return Store.open(store_path)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert _wait_until(lambda: num_loader_threads() == 0), "a loader thread outlived its test"


def num_loader_threads() -> int:
    return sum(thread.name.startswith("loader-") for thread in threading.enumerate())


def _wait_until(condition: Callable[[], bool]) -> bool:
    """True as soon as the condition holds, False when it does not within ten seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.005)
    return True


def make_loader(store: Store, **changes: Any) -> Loader:
    settings: dict[str, Any] = {
        "plan": plan_of(store),
        "layer_ids": LAYERS,
        "prefetch_bytes": 2 * PACK_BYTES,
        "num_threads": 2,
    }
    return Loader(store, **(settings | changes))


def features_of(pack: Pack, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What the drafter gets without scaling."""
    num_layers = next(iter(pack.tapped.parts.values())).shape[0]
    return pack.tapped.to_features(torch.device("cpu"), dtype, torch.ones(num_layers * HIDDEN, dtype=dtype))


def plain(pack: Pack) -> tuple[Any, ...]:
    """A copy of a pack that can be compared."""
    tensors = (pack.cu_seqlens, pack.input_ids, pack.loss_mask, pack.positions, features_of(pack).view(torch.int16))
    return (pack.samples, *(tensor.tolist() for tensor in tensors))


def read(loader: Loader, num_steps: int) -> list[tuple[Any, ...]]:
    """The next steps, copied, since their buffers are used again."""
    return [
        (b.step, b.epoch, [plain(pack) for pack in b.packs], b.supervised, b.tokens, b.state)
        for b in islice(loader, num_steps)
    ]


def plan_of(store: Store, **changes: Any) -> PackPlan:
    settings: dict[str, Any] = {"seed": 7, "token_budget": BUDGET, "packs_per_step": 3}
    return pack_plan(store, **(settings | changes))


def broken_read(
    monkeypatch: pytest.MonkeyPatch, store: Store, sample: int, error: BaseException, num_failures: int
) -> None:
    """Make the first `num_failures` reads of a sample fail."""
    original = store.read_hidden
    failures = [error] * num_failures

    def read_hidden(number: int, layer_ids: Any = None, out: Any = None) -> NDArray[np.uint16]:
        if number == sample and failures:
            raise failures.pop()
        return original(number, layer_ids, out)

    monkeypatch.setattr(store, "read_hidden", read_hidden)


def test_packs_hold_what_the_plan_and_the_store_say(store: Store) -> None:
    plan, cursor = plan_of(store), PackCursor()
    with make_loader(store) as loader:
        for step, batch in enumerate(islice(loader, 12)):
            expected, cursor = plan.step(cursor)
            assert batch.step == step
            assert batch.state == plan.state(cursor)
            assert batch.epoch == plan.epochs_done(cursor)
            assert [pack.samples for pack in batch.packs] == [tuple(pack.tolist()) for pack in expected]
            whole = np.concatenate(expected)
            assert batch.tokens == store.samples.length[whole].sum()
            assert batch.supervised == store.samples.supervised[whole].sum()
            for pack in batch.packs:
                check_pack(pack, store)


def check_pack(pack: Pack, store: Store) -> None:
    assert pack.cu_seqlens.dtype == torch.int32
    assert pack.input_ids.dtype == pack.positions.dtype == torch.int64
    assert pack.loss_mask.dtype == torch.bool
    features = features_of(pack)
    assert features.dtype == torch.bfloat16
    num_tokens = int(pack.cu_seqlens[-1])
    assert features.shape == (num_tokens, len(LAYERS) * HIDDEN)
    assert len(pack.input_ids) == len(pack.loss_mask) == len(pack.positions) == num_tokens <= BUDGET
    for i, sample in enumerate(pack.samples):
        rows = slice(int(pack.cu_seqlens[i]), int(pack.cu_seqlens[i + 1]))
        ids, mask = store.read_tokens(sample)
        assert pack.input_ids[rows].tolist() == ids.tolist()
        assert pack.loss_mask[rows].tolist() == mask.tolist()
        assert pack.positions[rows].tolist() == list(range(len(ids)))
        for column, layer in enumerate(LAYERS):
            found = features[rows, column * HIDDEN : (column + 1) * HIDDEN]
            stored = store.read_hidden(sample, [layer])[:, 0].view(np.int16)
            assert np.array_equal(found.view(torch.int16).numpy(), stored)


@pytest.mark.parametrize(("num_threads", "prefetch_bytes"), [(1, 0), (1, 10**6), (4, 0), (7, 3 * PACK_BYTES)])
def test_threads_and_read_ahead_change_nothing(store: Store, num_threads: int, prefetch_bytes: int) -> None:
    with make_loader(store) as usual:
        expected = read(usual, 15)
    with make_loader(store, num_threads=num_threads, prefetch_bytes=prefetch_bytes) as loader:
        assert read(loader, 15) == expected


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_ranks_together_get_the_packs_of_one_rank(store: Store, world_size: int) -> None:
    with make_loader(store) as alone:
        expected = read(alone, 8)
    ranks = []
    for rank in range(world_size):
        with make_loader(store, rank=rank, world_size=world_size) as loader:
            ranks.append(read(loader, 8))
    for step, (number, epoch, packs, *rest) in enumerate(expected):
        assert [ranks[i % world_size][step][2][i // world_size] for i in range(3)] == packs
        for found in ranks:
            assert (*found[step][:2], *found[step][3:]) == (number, epoch, *rest)
    assert all(step[2] == [] for rank in ranks[3:] for step in rank)


@pytest.mark.parametrize("stop", [0, 1, 4, 9])
def test_resuming_continues_on_another_number_of_ranks(store: Store, stop: int) -> None:
    with make_loader(store) as uninterrupted:
        expected = read(uninterrupted, 12)
    state = None
    with make_loader(store, rank=1, world_size=2) as before:
        for batch in islice(before, stop):
            state = json.loads(json.dumps(batch.state))
    with make_loader(store, start_state=state) as after:
        assert read(after, 12 - stop) == expected[stop:]


def test_resuming_with_other_settings_is_refused_by_name(store: Store) -> None:
    with make_loader(store) as loader:
        state = next(loader).state
    for change in ({"seed": 8}, {"token_budget": 41}, {"packs_per_step": 2}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            make_loader(store, plan=plan_of(store, **change), start_state=state)
    with pytest.raises(ConfigError, match="fingerprint"):
        make_loader(store, plan=plan_of(store, samples=np.arange(10)), start_state=state)


def test_only_chosen_and_never_rejected_samples_are_delivered(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s.zarr", LENGTHS, hidden_size=HIDDEN, layer_ids=(1, 2, 3), rejected=[4, 9])
    for samples in (None, np.array([9, 2, 3, 4, 2, 11])):
        wanted = {2, 3, 11} if samples is not None else set(range(len(LENGTHS))) - {4, 9}
        with make_loader(store, plan=plan_of(store, samples=samples)) as loader:
            seen = {sample for batch in islice(loader, 10) for pack in batch.packs for sample in pack.samples}
        assert seen == wanted


def test_a_pack_stays_intact_until_the_next_step_is_asked_for(store: Store) -> None:
    with make_loader(store, prefetch_bytes=10 * PACK_BYTES) as loader:
        batch = next(loader)
        before = [plain(pack) for pack in batch.packs]
        assert _wait_until(lambda: loader.stats().q_pack >= 9)  # read-ahead has used every other buffer
        assert [plain(pack) for pack in batch.packs] == before


@pytest.mark.parametrize(("prefetch_bytes", "num_ahead"), [(0, 1), (PACK_BYTES, 1), (5 * PACK_BYTES, 5)])
def test_memory_is_one_step_and_the_prefetch_budget(store: Store, prefetch_bytes: int, num_ahead: int) -> None:
    with make_loader(store, prefetch_bytes=prefetch_bytes) as loader:
        buffers = {pack.tapped.parts["bits"].data_ptr() for batch in islice(loader, 30) for pack in batch.packs}
        assert len(buffers) <= 3 + num_ahead
        assert _wait_until(lambda: loader.stats().q_pack == num_ahead)
        time.sleep(0.02)
        assert loader.stats().q_pack == num_ahead


def test_stats_count_what_was_read_and_delivered(store: Store) -> None:
    with make_loader(store, prefetch_bytes=4 * PACK_BYTES) as loader:
        delivered = [pack for batch in islice(loader, 5) for pack in batch.packs]
        assert _wait_until(lambda: loader.stats().q_pack == 4)
        stats = loader.stats()
        assert stats.packs_read == len(delivered) + 4
        assert stats.read_bytes >= sum(features_of(pack).numel() * 2 for pack in delivered)
        assert stats.q_read >= 4 and stats.retries == 0
        assert stats.wait_seconds > 0


@pytest.mark.parametrize("error", [OSError("stale handle"), CorruptError("bad checksum")])
def test_a_fault_that_passes_is_retried(store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with make_loader(store) as usual:
        expected = read(usual, 10)
    broken_read(monkeypatch, store, 5, error, num_failures=1)
    with make_loader(store) as loader:
        assert read(loader, 10) == expected
        assert loader.stats().retries == 1


def test_an_unreadable_sample_stops_the_run_at_its_step_with_the_cause(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [set(np.concatenate(packs).tolist()) for packs in steps_of(plan_of(store), 2)]
    sample = min(first[1] - first[0])
    broken_read(monkeypatch, store, sample, OSError(5, "input/output error"), num_failures=100)
    with make_loader(store, num_threads=4, prefetch_bytes=20 * PACK_BYTES) as loader:
        assert len(read(loader, 1)) == 1
        with pytest.raises(StoreError, match=f"sample {sample}(.|\n)*input/output error") as caught:
            next(loader)
        assert isinstance(caught.value.__cause__, OSError)
        assert num_loader_threads() == 0


@pytest.mark.parametrize("error", [OSError(5, "input/output error"), CorruptError("bad checksum")])
def test_an_unreadable_sample_can_be_left_out_and_all_else_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with make_loader(store) as usual:
        expected = read(usual, 12)
    broken_read(monkeypatch, store, 5, error, num_failures=100)
    num_found = 0
    with make_loader(store, skip_unreadable=True, prefetch_bytes=0) as loader:
        for (step, epoch, packs, *rest), batch in zip(expected, loader, strict=False):
            assert (batch.step, batch.epoch) == (step, epoch)
            assert [batch.supervised, batch.tokens, batch.state] == rest
            inside = [sample for pack in packs for sample in pack[0] if sample == 5]
            assert batch.unreadable == dict.fromkeys(inside, error)
            assert sorted(batch.samples.tolist()) == sorted(sample for pack in packs for sample in pack[0])
            num_found += len(inside)
            for pack, readable in zip(batch.packs, packs, strict=True):
                assert plain(pack) == without(5, readable)
        assert loader.stats().retries == 0
    assert num_found > 1


def without(sample: int, pack: tuple[Any, ...]) -> tuple[Any, ...]:
    """A plain pack with zeros in the place of one sample."""
    samples, bounds, ids, mask, positions, features = pack
    for i, number in enumerate(samples):
        if number == sample:
            rows = range(bounds[i], bounds[i + 1])
            ids = [0 if row in rows else value for row, value in enumerate(ids)]
            mask = [value and row not in rows for row, value in enumerate(mask)]
            features = [[0] * len(value) if row in rows else value for row, value in enumerate(features)]
    return samples, bounds, ids, mask, positions, features


def steps_of(plan: PackPlan, num_steps: int) -> Iterator[list[NDArray[np.int64]]]:
    cursor = PackCursor()
    for _ in range(num_steps):
        packs, cursor = plan.step(cursor)
        yield packs


@pytest.mark.parametrize(
    ("error", "skip"), [(CorruptError("bad checksum"), False), (AssertionError("a bug"), False), (ValueError(), True)]
)
def test_other_errors_reach_the_consumer_as_they_are_and_a_bug_is_never_skipped(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception, skip: bool
) -> None:
    broken_read(monkeypatch, store, 0, error, num_failures=100)
    with make_loader(store, skip_unreadable=skip) as loader, pytest.raises(type(error)) as caught:
        read(loader, 20)
    assert caught.value is error


def test_the_plan_is_computed_in_the_background_and_ahead(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PackPlan.step
    planned: list[tuple[str, int]] = []

    def step(plan: PackPlan, cursor: PackCursor) -> Any:
        planned.append((threading.current_thread().name, cursor.step))
        return original(plan, cursor)

    monkeypatch.setattr(PackPlan, "step", step)
    with make_loader(store, prefetch_bytes=6 * PACK_BYTES) as loader:
        read(loader, 1)
        assert _wait_until(lambda: len(planned) >= 3)  # what is delivered and two steps more
    assert {name for name, _ in planned} == {"loader-planner"}
    assert [number for _, number in planned] == list(range(len(planned)))


def test_an_error_of_the_planner_comes_after_the_steps_it_planned(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PackPlan.step

    def step(plan: PackPlan, cursor: PackCursor) -> Any:
        if cursor.step == 3:
            raise MemoryError("no room for the plan")
        return original(plan, cursor)

    monkeypatch.setattr(PackPlan, "step", step)
    with make_loader(store) as loader:
        assert len(read(loader, 3)) == 3
        with pytest.raises(MemoryError, match="no room"):
            next(loader)


@pytest.mark.parametrize("world_size", [1, 5])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_closing_at_any_time_stops_the_threads_and_ends_the_iteration(
    store: Store, num_steps: int, world_size: int
) -> None:
    loader = make_loader(store, rank=world_size - 1, world_size=world_size)
    read(loader, num_steps)
    loader.close()
    loader.close()
    assert num_loader_threads() == 0
    assert list(loader) == []


def test_closing_wakes_a_consumer_that_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read = threading.Event()
    original = store.read_tokens

    def read_tokens(sample: int) -> Any:
        may_read.wait(10)
        return original(sample)

    monkeypatch.setattr(store, "read_tokens", read_tokens)
    loader = make_loader(store)
    seen: list[StepBatch] = []
    consumer = threading.Thread(target=lambda: seen.extend(islice(loader, 1)))
    consumer.start()
    closer = threading.Thread(target=loader.close)
    closer.start()
    consumer.join(10)
    assert not consumer.is_alive() and seen == []
    may_read.set()
    closer.join(10)
    assert not closer.is_alive()


def test_a_forgotten_loader_stops_its_threads(store: Store) -> None:
    loader = make_loader(store)
    batch = next(loader)
    del loader
    assert _wait_until(lambda: num_loader_threads() == 0)
    check_pack(batch.packs[0], store)


def test_what_cannot_be_trained_on_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"\[3, 5\](.|\n)*\[1, 2, 3\]"):
        make_loader(store, layer_ids=(3, 5))
    part = make_store(tmp_path / "s.zarr", LENGTHS, layer_ids=LAYERS[::-1], shards=[0])
    with pytest.raises(StoreError, match="not complete"):
        make_loader(part)
    for samples, message in (([0, len(LENGTHS)], "no such sample"), ([], "no samples")):
        with pytest.raises(ConfigError, match=message):
            plan_of(store, samples=np.array(samples, dtype=np.int64))
