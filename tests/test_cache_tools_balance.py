"""Balance within a step: the same samples, every pack within the budget, equal cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_laws import BUDGET, EXTREMES, LAWS, half_supervised, lognormal, uniform
from numpy.typing import NDArray

from cache_tools.balance import balance_step
from cache_tools.packs import PackCursor, PackPlan

Ints = NDArray[np.int64]


def costs(packs: list[Ints], values: Ints) -> Ints:
    return np.array([values[pack].sum() for pack in packs])


def evenness(packs: list[Ints], values: Ints) -> float:
    """Mean / max over the packs of a step."""
    sums = costs(packs, values)
    return float(sums.mean() / sums.max())


def steps_of(plan: PackPlan, num_steps: int) -> list[list[Ints]]:
    steps, cursor = [], PackCursor()
    for _ in range(num_steps):
        packs, cursor = plan.step(cursor)
        steps.append(packs)
    return steps


@st.composite
def random_steps(draw: st.DrawFn) -> tuple[list[Ints], Ints, Ints, int]:
    """Packs of a step, lengths, supervised tokens, and a budget that the fullest pack just keeps."""
    counts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    total, longest = sum(counts), draw(st.integers(1, 60))
    key = draw(st.integers(0, 2**32))
    lengths = 1 + (uniform(total, key) * longest).astype(np.int64)
    supervised = (uniform(total, key + 1) * (lengths + 1)).astype(np.int64)
    packs = np.split(np.argsort(uniform(total, key + 2)), np.cumsum(counts)[:-1])
    spare = draw(st.integers(0, 30))
    return packs, lengths, supervised, int(costs(packs, lengths).max()) + spare


@settings(max_examples=60, deadline=None)
@given(random_steps())
def test_balance_keeps_samples_and_budget_and_makes_nothing_worse(case: tuple[list[Ints], Ints, Ints, int]) -> None:
    packs, lengths, supervised, token_budget = case
    found = balance_step(packs, lengths, token_budget)
    assert len(found) == len(packs) and all(len(pack) for pack in found)
    assert np.array_equal(np.sort(np.concatenate(found)), np.arange(len(lengths)))
    assert costs(found, lengths).max() <= token_budget
    assert costs(found, lengths**2).max() <= costs(packs, lengths**2).max()
    both = balance_step(packs, lengths, token_budget, supervised)
    assert np.array_equal(np.sort(np.concatenate(both)), np.arange(len(lengths)))
    assert costs(both, lengths).max() <= token_budget
    assert costs(both, supervised).max() <= costs(found, supervised).max()
    square_limit = (lengths**2).sum() / (0.994 * len(packs))
    assert costs(both, lengths**2).max() <= max(square_limit, costs(found, lengths**2).max())


def test_samples_of_a_pack_keep_the_order_of_the_step() -> None:
    lengths = lognormal(200, 0.75)
    packs = np.split(np.arange(200), 8)
    for pack in balance_step(packs, lengths, BUDGET * 2):
        assert (np.diff(pack) > 0).all()


def test_a_sample_that_comes_twice_stays_twice() -> None:
    lengths = np.array([50, 20, 30, 10, 40, 7])
    packs = [np.array([0, 1, 2]), np.array([1, 2, 1, 3, 5]), np.array([0, 4])]
    found = balance_step(packs, lengths, 120)
    assert sorted(np.concatenate(found).tolist()) == sorted(np.concatenate(packs).tolist())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("packs_per_step", [2, 8, 24])
def test_packs_of_a_step_cost_the_same(law: str, packs_per_step: int) -> None:
    lengths = LAWS[law](20_000)
    plan = PackPlan(lengths, seed=3, token_budget=BUDGET, packs_per_step=packs_per_step)
    steps = steps_of(plan, 24)
    assert np.mean([evenness(packs, lengths**2) for packs in steps]) > 0.99
    assert np.mean([evenness(packs, lengths) for packs in steps]) > 0.999


@pytest.mark.parametrize("law", LAWS)
def test_supervised_tokens_are_even_too(law: str) -> None:
    lengths = LAWS[law](20_000)
    supervised = half_supervised(lengths)
    plan = PackPlan(lengths, seed=3, token_budget=BUDGET, packs_per_step=8, supervised=supervised)
    without = steps_of(PackPlan(lengths, seed=3, token_budget=BUDGET, packs_per_step=8), 24)
    steps = steps_of(plan, 24)
    assert np.mean([evenness(packs, lengths**2) for packs in steps]) > 0.99
    assert np.mean([evenness(packs, lengths) for packs in steps]) > 0.999
    assert np.mean([evenness(packs, supervised) for packs in without]) < 0.93
    assert np.mean([evenness(packs, supervised) for packs in steps]) > 0.99


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_lengths_are_balanced_without_harm(name: str) -> None:
    lengths = EXTREMES[name]
    supervised = half_supervised(lengths)
    plan = PackPlan(lengths, seed=3, token_budget=BUDGET, packs_per_step=8, supervised=supervised)
    for packs in steps_of(plan, 3):
        assert len(packs) == 8
        assert all(len(pack) and lengths[pack].sum() <= BUDGET for pack in packs)
