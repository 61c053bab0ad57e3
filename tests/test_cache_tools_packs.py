"""Packs: every sample once per epoch, never over the budget, the same from any cursor."""

from __future__ import annotations

import json
import tracemalloc
from hashlib import blake2b
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_tools import packs as packs_module
from cache_tools.errors import ConfigError
from cache_tools.order import Permutation, mix64_array
from cache_tools.packs import PackCursor, PackPlan, assign_packs

Ints = NDArray[np.int64]
BUDGET = 49_152


def integer_lengths(n: int, *, low: int = 100, high: int = 4100) -> Ints:
    """Uniform lengths that no library can change."""
    return low + (mix64_array(99, np.arange(n)) % np.uint64(high - low)).astype(np.int64)


def epoch_packs(plan: PackPlan, epoch: int) -> list[Ints]:
    windows = (plan.window_packs(epoch, window) for window in range(plan.num_windows))
    return [packs.pack(i) for packs in windows for i in range(packs.num_packs)]


def walk(plan: PackPlan, cursor: PackCursor, num_steps: int) -> tuple[list[list[list[int]]], PackCursor]:
    steps = []
    for _ in range(num_steps):
        packs, cursor = plan.step(cursor)
        steps.append([pack.tolist() for pack in packs])
    return steps, cursor


LENGTHS = {
    "typical": integer_lengths(2000),
    "multiples of 64": integer_lengths(2000) // 64 * 64 + 64,
    "all equal": np.full(2000, 1000),
    "all over half": np.full(300, 25_000),
    "all of them the budget": np.full(50, BUDGET),
    "two lengths that hardly mix": np.where(integer_lengths(2000) % 2 == 0, 200, 8192),
    "one giant": np.append(integer_lengths(500), BUDGET),
    "giants and dust": np.where(np.arange(3000) % 10 == 0, BUDGET - 7, 1),
    "very many tiny": np.full(20_000, 3),
    "a few": integer_lengths(3),
    "one": np.array([17]),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_epoch_has_every_sample_once_and_no_pack_over_the_budget(name: str) -> None:
    lengths = LENGTHS[name]
    plan = PackPlan(lengths, seed=1, token_budget=BUDGET, packs_per_step=4)
    for epoch in range(3):
        packs = epoch_packs(plan, epoch)
        assert np.array_equal(np.sort(np.concatenate(packs)), np.arange(len(lengths)))
        assert all(len(pack) >= 1 and lengths[pack].sum() <= BUDGET for pack in packs)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 200), st.data())
def test_any_lengths_are_packed_within_the_budget(token_budget: int, data: st.DataObject) -> None:
    some = st.lists(st.integers(1, token_budget), min_size=1, max_size=60)
    lengths = np.array(data.draw(some) * data.draw(st.integers(1, 5)))
    pack_of = assign_packs(lengths, token_budget)
    num_packs = int(pack_of.max()) + 1
    assert np.array_equal(np.unique(pack_of), np.arange(num_packs))
    assert np.bincount(pack_of, weights=lengths).max() <= token_budget
    # Nothing is worse than a pack of its own for each sample over half, and half-full packs for the others.
    assert num_packs <= 2 * lengths.sum() / token_budget + len(lengths) / 4 + 2


@pytest.mark.parametrize(
    ("name", "expected"), [("typical", 0.99), ("multiples of 64", 0.99), ("all equal", 0.97), ("one giant", 0.97)]
)
def test_packs_are_full(name: str, expected: float) -> None:
    lengths = LENGTHS[name]
    packs = epoch_packs(PackPlan(lengths, seed=0, token_budget=BUDGET, packs_per_step=1), 0)
    assert lengths.sum() / (len(packs) * BUDGET) > expected


def test_a_small_set_of_short_samples_is_packed_well() -> None:
    lengths = integer_lengths(1500, low=40, high=240)
    plan = PackPlan(lengths, seed=0, token_budget=768, packs_per_step=8)
    for epoch in range(5):
        assert lengths.sum() / (len(epoch_packs(plan, epoch)) * 768) > 0.99


def test_samples_that_fit_into_one_pack_become_one_pack() -> None:
    assert assign_packs(np.array([500, 268]), 768).tolist() == [0, 0]


def test_repair_moves_few_samples_away_from_their_place_in_the_stream() -> None:
    lengths = integer_lengths(30_000)
    pack_of = assign_packs(lengths, BUDGET)
    num_packs = int(pack_of.max()) + 1
    in_stream = (np.cumsum(lengths) - lengths // 2) * num_packs // lengths.sum()
    assert np.mean(np.abs(in_stream - pack_of) > 1) < 0.1


def test_plans_are_frozen() -> None:
    plan = PackPlan(integer_lengths(70_000), seed=5, token_budget=BUDGET, packs_per_step=8)
    digest = blake2b(digest_size=8)
    for pack in epoch_packs(plan, 2):
        digest.update(pack.astype("<i8").tobytes() + b"|")
    assert digest.hexdigest() == "ff68e83953324ce6"
    assert plan.fingerprint == "60e81174419e8a9a33c6abd4e12421b1"
    assert walk(plan, PackCursor(), 1)[0][0][0][:5] == [65355, 61663, 32238, 68237, 55735]


@pytest.mark.parametrize(("with_supervised", "expected"), [(False, "91fe8f09317620b7"), (True, "7a5dc8af801f35a4")])
def test_steps_are_frozen(with_supervised: bool, expected: str) -> None:
    lengths = integer_lengths(70_000)
    supervised = (lengths * (mix64_array(7, np.arange(70_000)) % np.uint64(100)).astype(np.int64)) // 100
    plan = PackPlan(
        lengths,
        seed=5,
        token_budget=BUDGET,
        packs_per_step=8,
        supervised=supervised if with_supervised else None,
    )
    digest = blake2b(digest_size=8)
    for step in walk(plan, PackCursor(), 40)[0]:
        for pack in step:
            digest.update(np.array(pack, dtype="<i8").tobytes() + b"|")
        digest.update(b"/")
    assert digest.hexdigest() == expected


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=150),
    st.integers(1, 12),
    st.integers(1, 32),
    st.integers(0, 20),
)
def test_every_sample_comes_once_per_epoch_on_any_number_of_ranks(
    lengths: list[int], packs_per_step: int, world_size: int, num_steps: int
) -> None:
    supervised = np.array(lengths) // 2

    def fresh() -> PackPlan:
        return PackPlan(
            np.array(lengths), seed=1, token_budget=60, packs_per_step=packs_per_step, supervised=supervised
        )

    alone, end = walk(fresh(), PackCursor(), num_steps)
    counts = np.zeros(len(lengths), dtype=np.int64)
    for step, again in zip(alone, walk(fresh(), PackCursor(), num_steps)[0], strict=True):
        on_ranks = [pack for rank in range(world_size) for pack in again[rank::world_size]]
        assert sorted(on_ranks) == sorted(step) and len(step) == packs_per_step
        for pack in on_ranks:
            assert len(pack) >= 1 and sum(lengths[sample] for sample in pack) <= 60
            np.add.at(counts, pack, 1)
    begun = fresh().window_packs(end.epoch, 0)
    expected = np.full(len(lengths), end.epoch)
    expected[begun.samples[: begun.offsets[end.pack]]] += 1
    assert np.array_equal(counts, expected)


@pytest.mark.parametrize("num_steps", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_run_killed_again_and_again_on_changing_numbers_of_ranks_trains_on_the_same(num_steps: int) -> None:
    lengths = integer_lengths(1500)
    token_budget = 12_000

    def fresh() -> PackPlan:
        return PackPlan(lengths, seed=9, token_budget=token_budget, packs_per_step=6, supervised=lengths // 3)

    def chained(before: bytes, step: list[Ints]) -> bytes:
        digest = blake2b(before, digest_size=16)
        for pack in sorted(step, key=lambda samples: int(samples[0])):
            digest.update(np.sort(pack).astype("<i8").tobytes() + b"|")
        return digest.digest()

    plan, cursor, chain_alone = fresh(), PackCursor(), b""
    state, chain_killed, until_kill, world_size = plan.state(cursor), b"", 0, 1
    killed = plan
    for i in range(num_steps):
        step, cursor = plan.step(cursor)
        chain_alone = chained(chain_alone, step)
        if until_kill == 0:
            killed = fresh()
            until_kill, world_size = (mix64_array(i, np.arange(2)) % np.uint64(32) + np.uint64(1)).tolist()
        until_kill -= 1
        again, position = killed.step(killed.resume(json.loads(json.dumps(state))))
        state = killed.state(position)
        chain_killed = chained(chain_killed, [pack for rank in range(world_size) for pack in again[rank::world_size]])
        assert chain_killed == chain_alone, i


def test_a_pack_of_another_epoch_changes_nothing_for_the_samples_of_a_step() -> None:
    lengths = integer_lengths(40)
    plan = PackPlan(lengths, seed=1, token_budget=BUDGET, packs_per_step=7)
    first, _ = walk(plan, PackCursor(), 1)
    packs = epoch_packs(plan, 0) + epoch_packs(plan, 1) + epoch_packs(plan, 2) + epoch_packs(plan, 3)
    assert sorted(sample for pack in first[0] for sample in pack) == sorted(np.concatenate(packs[:7]).tolist())


def test_windows_are_cut_from_the_stream_and_a_short_last_one_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs_module, "WINDOW", 100)
    plan = PackPlan(integer_lengths(350), seed=4, token_budget=8000, packs_per_step=2)
    stream = Permutation(350, seed=4, epoch=6)(np.arange(350))
    assert [plan.window_range(i) for i in range(plan.num_windows)] == [range(100), range(100, 200), range(200, 350)]
    for window in range(plan.num_windows):
        positions = plan.window_range(window)
        found = plan.window_packs(6, window).samples
        assert set(found.tolist()) == set(stream[positions.start : positions.stop].tolist())


def test_packs_of_a_window_come_in_random_order() -> None:
    """Of packs of four samples, neighbours in the stream are alike: their lag-1 correlation is 0.03 to 0.04."""
    lengths = integer_lengths(20_000)
    plan = PackPlan(lengths, seed=4, token_budget=8192, packs_per_step=2)
    place = np.argsort(Permutation(len(lengths), seed=4, epoch=0)(np.arange(len(lengths))))
    middles = np.array([np.median(place[pack]) for pack in epoch_packs(plan, 0)])
    assert abs(np.corrcoef(middles[1:], middles[:-1])[0, 1]) * np.sqrt(len(middles)) < 4
    others = [np.median(place[pack]) for pack in epoch_packs(plan, 1)]
    assert abs(np.corrcoef(middles[:4000], others[:4000])[0, 1]) * np.sqrt(4000) < 4


def test_samples_within_a_pack_keep_the_order_of_the_stream() -> None:
    plan = PackPlan(integer_lengths(500), seed=4, token_budget=BUDGET, packs_per_step=2)
    place = np.argsort(Permutation(500, seed=4, epoch=0)(np.arange(500)))
    for pack in epoch_packs(plan, 0):
        assert all(a < b for a, b in pairwise(place[pack].tolist()))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=120),
    st.integers(1, 9),
    st.integers(5, 40),
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
)
def test_stopping_anywhere_and_resuming_gives_the_same_endless_sequence(
    lengths: list[int], packs_per_step: int, window: int, cuts: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs_module, "WINDOW", window)

        def fresh() -> PackPlan:
            return PackPlan(np.array(lengths), seed=1, token_budget=60, packs_per_step=packs_per_step)

        expected, end = walk(fresh(), PackCursor(), sum(cuts))
        found, cursor = [], PackCursor()
        for num_steps in cuts:
            plan = fresh()
            steps, cursor = walk(plan, plan.resume(json.loads(json.dumps(plan.state(cursor)))), num_steps)
            found += steps
        assert found == expected
        assert cursor == end and cursor.step == sum(cuts)

        # Within a step samples may change packs; which samples a step holds is what its packs hold.
        by_step = [sorted(sample for pack in step for sample in pack) for step in expected]
        plan = fresh()
        packs: list[list[int]] = []
        for epoch in range(end.epoch + 1):
            packs += [pack.tolist() for pack in epoch_packs(plan, epoch)]
        for i, samples in enumerate(by_step):
            assert samples == sorted(chain(*packs[i * packs_per_step : (i + 1) * packs_per_step]))


def test_memory_of_a_step_does_not_grow_with_the_number_of_samples() -> None:
    """Only the lengths do; the order itself takes none."""

    def peak(n: int) -> int:
        plan = PackPlan(np.full(n, 2000), seed=0, token_budget=BUDGET, packs_per_step=8)
        tracemalloc.start()
        walk(plan, PackCursor(epoch=1), 3)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small, large = peak(2 * packs_module.WINDOW), peak(40 * packs_module.WINDOW)
    assert large < 1.2 * small < 100 * packs_module.WINDOW * 8


def test_a_step_larger_than_an_epoch_reaches_into_the_next_ones() -> None:
    plan = PackPlan(np.array([5, 6, 7]), seed=0, token_budget=20, packs_per_step=5)
    packs, after = plan.step(PackCursor())
    assert [sorted(pack.tolist()) for pack in packs] == [[0, 1, 2]] * 5
    assert after == PackCursor(step=1, epoch=5)


def test_epochs_done_grows_from_zero_through_whole_epochs() -> None:
    plan = PackPlan(integer_lengths(300), seed=0, token_budget=8000, packs_per_step=3)
    cursor, seen = PackCursor(), []
    for _ in range(200):
        seen.append(plan.epochs_done(cursor))
        _, cursor = plan.step(cursor)
    assert seen[0] == 0
    assert all(a < b for a, b in pairwise(seen))
    assert plan.epochs_done(PackCursor(epoch=3)) == 3


@pytest.mark.parametrize("epochs", [0.5, 1.0, 2.5])
def test_num_steps_covers_the_epochs_and_no_more(epochs: float) -> None:
    plan = PackPlan(integer_lengths(300), seed=0, token_budget=8000, packs_per_step=3)
    num_steps = plan.num_steps(epochs)
    _, cursor = walk(plan, PackCursor(), num_steps - 1)
    assert plan.epochs_done(cursor) < epochs <= plan.epochs_done(plan.step(cursor)[1])


def test_chosen_samples_keep_their_numbers() -> None:
    lengths, chosen = integer_lengths(50), np.arange(100, 150)
    plain = PackPlan(lengths, seed=0, token_budget=BUDGET, packs_per_step=2)
    moved = PackPlan(lengths, seed=0, token_budget=BUDGET, packs_per_step=2, samples=chosen)
    expected = [[[sample + 100 for sample in pack] for pack in step] for step in walk(plain, PackCursor(), 3)[0]]
    assert walk(moved, PackCursor(), 3)[0] == expected


def test_state_is_small_plain_json() -> None:
    plan = PackPlan(integer_lengths(50), seed=2**62, token_budget=BUDGET, packs_per_step=48)
    text = json.dumps(plan.state(PackCursor(step=10**9, epoch=10**6, window=10**6, pack=10**5)))
    assert len(text) < 1000


@pytest.mark.parametrize(
    "field", ["seed", "token_budget", "packs_per_step", "fingerprint", "packer_version", "strategy"]
)
def test_resuming_another_order_is_refused_by_name(field: str) -> None:
    lengths = integer_lengths(50)
    plan = PackPlan(lengths, seed=0, token_budget=BUDGET, packs_per_step=2)
    state = plan.state(PackCursor())
    state[field] = "other" if field == "fingerprint" else 77
    with pytest.raises(ConfigError, match=f": {field} differ"):
        plan.resume(state)


@pytest.mark.parametrize("change", ["lengths", "samples", "identity"])
def test_fingerprint_covers_what_the_packs_are_made_of(change: str) -> None:
    lengths = integer_lengths(50)
    other = lengths.copy()
    other[[3, 4]] += [1, -1]
    plan = PackPlan(lengths, seed=0, token_budget=BUDGET, packs_per_step=2, identity=b"a")
    changed = PackPlan(
        other if change == "lengths" else lengths,
        seed=0,
        token_budget=BUDGET,
        packs_per_step=2,
        samples=np.arange(1, 51) if change == "samples" else None,
        identity=b"b" if change == "identity" else b"a",
    )
    with pytest.raises(ConfigError, match="fingerprint"):
        changed.resume(plan.state(PackCursor()))


def test_a_sample_over_the_budget_is_refused_by_its_number() -> None:
    with pytest.raises(ConfigError, match=r"Sample 12 does not fit(.|\n)*1001 tokens(.|\n)*1000"):
        PackPlan(np.array([5, 1001]), seed=0, token_budget=1000, packs_per_step=1, samples=np.array([11, 12]))


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        PackPlan(np.array([], dtype=np.int64), seed=0, token_budget=10, packs_per_step=1)
    with pytest.raises(ConfigError, match="at least one pack"):
        PackPlan(np.array([1]), seed=0, token_budget=10, packs_per_step=0)
    for token_budget in (0, 1 << 28):
        with pytest.raises(ConfigError, match="token budget"):
            PackPlan(np.array([1]), seed=0, token_budget=token_budget, packs_per_step=1)
