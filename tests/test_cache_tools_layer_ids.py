"""The rule that picks the tapped target layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_tools.errors import ConfigError
from cache_tools.layer_ids import default_layer_ids


@pytest.mark.parametrize(
    ("num_target_layers", "num_draft_layers", "expected"),
    [
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (32, 5, (1, 8, 15, 22, 29)),
        (30, 5, (1, 8, 14, 20, 27)),
        (30, 1, (15,)),
        (4, 1, (2,)),
    ],
)
def test_published_taps_come_out(num_target_layers: int, num_draft_layers: int, expected: tuple[int, ...]) -> None:
    assert default_layer_ids(num_target_layers, num_draft_layers) == expected


@given(st.integers(1, 200), st.integers(1, 12))
def test_taps_are_distinct_ascending_layers_of_the_target_or_refused(
    num_target_layers: int, num_draft_layers: int
) -> None:
    try:
        ids = default_layer_ids(num_target_layers, num_draft_layers)
    except ConfigError:
        assert num_draft_layers > 1 and num_target_layers < num_draft_layers + 3
        return
    assert len(ids) == num_draft_layers and list(ids) == sorted(set(ids))
    assert ids[0] >= 0 and ids[-1] <= max(num_target_layers - 3, num_target_layers // 2)


def test_no_draft_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        default_layer_ids(64, 0)
