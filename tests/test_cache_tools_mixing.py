"""Sources with weights: exact counts, whole repeats, nested subsets."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_tools.errors import ConfigError
from cache_tools.mixing import mix_sources, parse_weights
from cache_tools.packs import PackPlan

weights = st.fractions(0, 4, max_denominator=50)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.tuples(*[weights] * 4), st.integers(0, 2**63))
def test_each_source_contributes_exactly_its_weight(
    sources: list[int], chosen: tuple[Fraction, ...], seed: int
) -> None:
    source = np.array(sources)
    expected = [floor(chosen[i] * sources.count(i)) for i in range(4)]
    samples = np.arange(len(source)) + 100
    if not sum(expected):
        with pytest.raises(ConfigError, match="nothing to train on"):
            mix_sources(samples, source, chosen, seed=seed)
        return
    mixed = mix_sources(samples, source, chosen, seed=seed)
    assert (np.diff(mixed) >= 0).all()
    assert np.bincount(source[mixed - 100], minlength=4).tolist() == expected
    times = np.bincount(mixed - 100, minlength=len(source))
    for sample, index in enumerate(sources):
        assert floor(chosen[index]) <= times[sample] <= floor(chosen[index]) + 1


@settings(max_examples=50, deadline=None)
@given(weights, weights)
def test_a_larger_weight_only_adds(a: Fraction, b: Fraction) -> None:
    samples, source = np.arange(60), np.repeat([0, 1], 30)
    less, more = (mix_sources(samples, source, [w, Fraction(1)], seed=3) for w in sorted((a, b)))
    assert (np.bincount(less, minlength=60) <= np.bincount(more, minlength=60)).all()


def test_a_subset_does_not_depend_on_the_other_samples() -> None:
    source = np.repeat([0, 1], 50)
    half = [Fraction(1, 2), Fraction(1, 2)]
    together = mix_sources(np.arange(100), source, half, seed=5)
    alone = mix_sources(np.arange(50, 100), source[50:], half, seed=5)
    assert together[together >= 50].tolist() == alone.tolist()
    assert alone.tolist() != mix_sources(np.arange(50, 100), source[50:], half, seed=6).tolist()


def test_repeats_are_shuffled_like_samples_of_their_own() -> None:
    lengths = np.arange(10, 40)
    mixed = mix_sources(np.arange(30), np.zeros(30, dtype=np.int64), [Fraction(5, 2)], seed=0)
    plan = PackPlan(lengths[mixed], seed=0, token_budget=100, packs_per_step=2, samples=mixed)
    packs = plan.window_packs(0, 0)
    assert np.array_equal(np.sort(mixed[packs.samples]), mixed)


def test_weights_are_exact_and_default_to_one() -> None:
    assert parse_weights(["b=0.1", "a=x=1/3"], ["a=x", "b", "c"]) == [Fraction(1, 3), Fraction(1, 10), Fraction(1)]


@pytest.mark.parametrize(
    ("given_weights", "message"),
    [
        (["chta=2"], r"no source(.|\n)*did you mean chat\?"),
        (["chat"], "no source"),
        (["chat=many"], "not a number"),
        (["chat=1/0"], "not a number"),
        (["chat=-1"], "out of range"),
        (["chat=1e9"], "out of range"),
        (["chat=1", "chat=2"], "two weights"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(given_weights: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_weights(given_weights, ["chat", "code"])
