"""Checkpoints: complete or absent, exact, and clear about damage."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from cache_tools.errors import CheckpointError
from train import checkpoint as checkpoints
from train.checkpoint import Checkpoint


def example(step: int) -> Checkpoint:
    parameter = torch.nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(step)))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return Checkpoint(
        step=step,
        weights={"fc.weight": parameter.detach()},
        feature_scale=torch.rand(6),
        optimizer=optimizer.state_dict(),
        drafter={"hidden_size": 3},
        config={"seed": 1},
        cursor={"epoch": 2},
    )


def test_a_saved_checkpoint_loads_bit_for_bit(tmp_path: Path) -> None:
    saved = example(5)
    path = checkpoints.save(tmp_path, saved, keep=2)
    loaded = checkpoints.load(path)
    assert checkpoints.latest(tmp_path) == path
    assert torch.equal(loaded.weights["fc.weight"], saved.weights["fc.weight"])
    assert torch.equal(loaded.feature_scale, saved.feature_scale)
    for key, value in saved.optimizer["state"][0].items():
        assert torch.equal(loaded.optimizer["state"][0][key], value)
    plain = [f.name for f in dataclasses.fields(saved) if f.name not in ("weights", "feature_scale", "optimizer")]
    assert all(getattr(loaded, name) == getattr(saved, name) for name in plain)


def test_only_the_newest_are_kept_and_leftovers_of_a_kill_vanish(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / ".tmp-1-step-000000001"
    leftover.mkdir(parents=True)
    for step in (1, 2, 10):
        checkpoints.save(tmp_path, example(step), keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-000000002",
        "step-000000010",
    ]
    assert checkpoints.latest(tmp_path) == tmp_path / "checkpoints" / "step-000000010"


def test_a_half_written_folder_is_never_the_latest(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, example(1), keep=2)
    (tmp_path / "checkpoints" / ".tmp-9-step-000000002").mkdir()
    latest = checkpoints.latest(tmp_path)
    assert latest is not None
    assert latest.name == "step-000000001"


def test_a_checkpoint_without_checksums_is_damaged(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, example(1), keep=2) / "trainer.json"
    plain = json.loads(path.read_text())
    del plain["crc32c"]
    path.write_text(json.dumps(plain))
    with pytest.raises(CheckpointError, match="crc32c"):
        checkpoints.load(path.parent)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.pt", "trainer.json"])
@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_damage_is_an_error_that_names_the_folder(tmp_path: Path, name: str, damage: str) -> None:
    path = checkpoints.save(tmp_path, example(1), keep=2)
    if damage == "remove":
        (path / name).unlink()
    else:
        (path / name).write_bytes((path / name).read_bytes()[:20])
    with pytest.raises(CheckpointError, match="step-000000001"):
        checkpoints.load(path)


def test_a_full_disk_is_a_message_and_leaves_older_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(tmp_path, example(1), keep=2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.save(tmp_path, example(2), keep=2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000000001"]
