"""Learning rate and noise over the steps."""

from __future__ import annotations

import math

import pytest

from train.schedule import cosine, learning_rate


def rate(step: int) -> float:
    return learning_rate(step, total=100, peak=2.0, warmup_ratio=0.1, min_ratio=0.1)


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert [rate(step) for step in range(10)] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rate(10) == 2.0


def test_cosine_reaches_half_way_and_the_minimum() -> None:
    assert rate(55) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rate(100) == pytest.approx(0.2)
    assert all(rate(step) > rate(step + 1) for step in range(10, 100))


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(0, total=10, peak=1.0, warmup_ratio=0.0, min_ratio=0.0) == 1.0


def test_noise_goes_from_start_to_end_along_half_a_cosine() -> None:
    values = [cosine(step, total=4, start=1.0, end=0.2) for step in range(5)]
    assert values == pytest.approx([0.2 + 0.4 * (1 + math.cos(math.pi * step / 4)) for step in range(5)])
    assert (values[0], values[-1]) == pytest.approx((1.0, 0.2))
