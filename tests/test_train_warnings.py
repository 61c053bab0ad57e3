"""Warnings before training: said when there is reason, and only then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from test_train_loop import settings

from cache_tools.synthetic import make_store
from train.warnings import warnings


def test_a_mask_token_that_the_data_contains_is_counted(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s.zarr", [30, 20])
    ids = np.concatenate([store.read_tokens(sample)[0] for sample in range(2)])
    present, absent = int(ids[0]), int(np.setdiff1d(np.arange(64), ids)[0])
    for token, expected in ((present, int((ids == present).sum())), (absent, 0)):
        config = settings(tmp_path / "s.zarr", tmp_path / "run", mask_token_id=token)
        lines = list(warnings(config, store, np.arange(2), steps_per_epoch=5.0))
        assert len(lines) == (1 if expected else 0)
        assert all(f"mask token {token} occurs {expected} times" in line for line in lines)


def test_a_step_of_several_epochs_is_pointed_out(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s.zarr", [30])
    absent = int(np.setdiff1d(np.arange(64), store.read_tokens(0)[0])[0])
    config = settings(tmp_path / "s.zarr", tmp_path / "run", mask_token_id=absent)
    (line,) = warnings(config, store, np.arange(1), steps_per_epoch=0.125)
    assert "8.0 passes" in line
