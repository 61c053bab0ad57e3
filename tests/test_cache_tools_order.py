"""The keyed hash and the keyed permutation: fixed for ever, bijective, and without visible structure."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_tools.order import Permutation, mix64, mix64_array

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 100, 1000, 1024, 4095, 4096, 4097, 65_536]


def whole(n: int, *, seed: int = 0, epoch: int = 0) -> NDArray[np.int64]:
    return Permutation(n, seed=seed, epoch=epoch)(np.arange(n))


def oracle(n: int, seed: int, epoch: int, position: int) -> int:
    """The definition, one element at a time in Python's integers."""

    def scramble(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)

    num_rows = min(r for r in range(1, n + 1) if r * r >= n)
    sizes = num_rows, (n + num_rows - 1) // num_rows
    value = position
    while True:
        cell = list(divmod(value, sizes[1]))
        for i in range(16):
            key = mix64(0x6F72646572, seed, epoch, i)
            noise = scramble((key + (cell[1 - i % 2] + 1) * GAMMA) & MASK) >> 32
            cell[i % 2] = (cell[i % 2] + (noise * sizes[i % 2] >> 32)) % sizes[i % 2]
        value = cell[0] * sizes[1] + cell[1]
        if value < n:
            return value


def test_hash_of_one_number_is_published_splitmix64() -> None:
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(1234567) == 6457827717110365317


def test_hash_values_are_frozen() -> None:
    assert mix64(1, 2, 3) == 7702586659592502839
    assert mix64(-1) == 16490336266968443936
    assert mix64() == 0


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8), st.integers(-(2**70), 2**70))
def test_array_hash_equals_scalar_hash(values: list[int], other: int) -> None:
    found = mix64_array(other, np.array(values, dtype=np.int64), 5)
    assert found.dtype == np.uint64
    assert found.tolist() == [mix64(other, value, 5) for value in values]


def test_array_hash_broadcasts_and_leaves_its_arguments_alone() -> None:
    rows, columns = np.arange(3, dtype=np.uint64)[:, None], np.arange(4, dtype=np.int32)
    found = mix64_array(rows, columns)
    assert found.tolist() == [[mix64(i, j) for j in range(4)] for i in range(3)]
    assert rows[:, 0].tolist() == [0, 1, 2] and columns.tolist() == [0, 1, 2, 3]


def test_hash_depends_on_the_order_and_number_of_parts() -> None:
    assert len({mix64(1, 2), mix64(2, 1), mix64(1, 2, 0), mix64(0, 1, 2), mix64(3)}) == 5


@pytest.mark.parametrize("n", SIZES)
def test_permutation_hits_every_element_once(n: int) -> None:
    for seed in range(3):
        assert np.array_equal(np.sort(whole(n, seed=seed)), np.arange(n))


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 1000))
def test_permutation_is_a_bijection_for_any_size_and_key(n: int, seed: int, epoch: int) -> None:
    assert len(np.unique(whole(n, seed=seed, epoch=epoch))) == n


@given(st.integers(1, 500), st.integers(0, 100), st.integers(0, 5), st.data())
def test_permutation_equals_its_scalar_definition(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, n - 1))
    assert Permutation(n, seed=seed, epoch=epoch)(np.array([position])).tolist() == [oracle(n, seed, epoch, position)]


def test_any_part_of_a_permutation_is_computed_alone() -> None:
    order = Permutation(902_000, seed=3, epoch=1)
    full = order(np.arange(902_000))
    some = np.array([[901_999, 0], [32_768, 5]])
    assert np.array_equal(order(some), full[some])


GOLDEN = {
    1: "ca08ea5bca49cc18",
    2: "eb82aaee034ca970",
    3: "93d648681ccf195c",
    8: "7952a719d1c78764",
    1000: "535e6de3a081f2d8",
    902_000: "bcf775964ace0b7e",
}


@pytest.mark.parametrize("n", GOLDEN)
def test_permutations_are_frozen(n: int) -> None:
    found = whole(n, seed=7, epoch=3)
    assert blake2b(found.astype("<i8").tobytes(), digest_size=8).hexdigest() == GOLDEN[n]


def test_seed_and_epoch_give_unrelated_orders() -> None:
    orders = [whole(10_000, seed=seed, epoch=epoch) for seed in range(3) for epoch in range(3)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert np.count_nonzero(a == b) < 10  # one is expected
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.04  # four standard deviations


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_every_order_of_a_few_elements_is_equally_likely(n: int) -> None:
    num_orders = {3: 6, 4: 24, 5: 120, 6: 720}[n]
    expected = 10
    counts = Counter(whole(n, seed=seed).tobytes() for seed in range(num_orders * expected))
    freedom = num_orders - 1
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    statistic += expected * (num_orders - len(counts))
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [1 << 16, 90_200])
def test_neighbours_at_any_distance_are_uncorrelated(n: int) -> None:
    order = whole(n, seed=1).astype(np.float64)
    order -= order.mean()
    # Distances include the sides of the grid that the permutation works on, where its structure would show.
    side = int(np.ceil(np.sqrt(n)))
    for distance in (1, 2, 3, 4, 7, 8, side - 1, side, side + 1, 2 * side, 1024):
        rho = (order[distance:] * order[:-distance]).sum() / (order**2).sum()
        assert abs(rho) * np.sqrt(n) < 4, distance


@pytest.mark.parametrize("side", [10, 50])
@pytest.mark.parametrize("n", [1 << 16, 90_200])
def test_positions_and_elements_are_independent(n: int, side: int) -> None:
    cells = np.arange(n) * side // n * side + whole(n, seed=2) * side // n
    counts = np.bincount(cells, minlength=side * side)
    statistic = ((counts - n / side**2) ** 2 / (n / side**2)).sum()
    freedom = (side - 1) ** 2
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)
