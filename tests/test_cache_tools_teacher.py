"""What a store keeps of the target's own prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from cache_tools.errors import ConfigError
from cache_tools.synthetic import make_store, sample_teacher
from cache_tools.teacher import Teacher


@pytest.mark.parametrize("teacher", ["hidden", "hidden:all", "topk:5"])
def test_the_teacher_is_read_back_and_other_programs_read_it_too(teacher: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [1, 30, 7, 40, 2], chunk_rows=4, teacher=teacher)
    group = zarr.open_group(str(store.path), mode="r")
    for sample in range(store.num_samples):
        start, length = int(store.samples.start[sample]), int(store.samples.length[sample])
        read = store.read_teacher(sample)
        written = sample_teacher(store.manifest, length, 0, sample)
        assert read.keys() == written.keys() and read
        for name, values in read.items():
            array: Any = group[f"last/{name}"]
            assert np.array_equal(values, written[name])
            assert np.array_equal(values, array[start : start + length])


@pytest.mark.parametrize("text", ["", "topk", "topk:0", "topk:2000", "hidden:some", "Hidden", "topk:5x"])
def test_other_teachers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="teacher"):
        Teacher.parse(text)


def test_a_row_is_kept_where_the_next_token_is_supervised() -> None:
    mask = np.array([0, 1, 1, 0, 1], bool)
    assert Teacher.parse("hidden").rows(mask).tolist() == [True, True, False, True, False]
    assert Teacher.parse("topk:3").rows(mask).tolist() == [True, True, False, True, False]
    assert Teacher.parse("hidden:all").rows(mask).all()
