"""Checkpoints of a training run: a folder that exists is complete, and holds all that exact resumption needs."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_tools.errors import CheckpointError

_NAME = re.compile(r"step-(\d{9})")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything after `step` optimizer steps."""

    step: int
    weights: dict[str, Tensor]
    """fp32 master weights of the drafter by their exported names, in the parametrisation that is trained."""
    feature_scale: Tensor
    """float32 [num_tapped * hidden]; context features are multiplied by it before `fc`."""
    optimizer: dict[str, Any]
    """State dict of the optimizer."""
    drafter: dict[str, Any]
    """Architecture, as plain values."""
    config: dict[str, Any]
    """Settings of the run, as plain values."""
    cursor: dict[str, Any]
    """Position in the endless sequence of packs."""


def save(run: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Writes `run/checkpoints/step-N` by temporary name, fsync and rename; then removes all but the `keep` newest.

    Raises CheckpointError when the disk does not take it; older checkpoints stay.
    """
    folder = run / "checkpoints"
    final = folder / f"step-{checkpoint.step:09d}"
    temporary = folder / f".tmp-{os.getpid()}-{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temporary.mkdir()
        tensors = {f"drafter.{name}": tensor for name, tensor in checkpoint.weights.items()}
        tensors["feature_scale"] = checkpoint.feature_scale
        save_file(
            {name: tensor.contiguous().cpu() for name, tensor in tensors.items()},
            temporary / "weights.safetensors",
        )
        torch.save(checkpoint.optimizer, temporary / "optimizer.pt")
        plain = {name: getattr(checkpoint, name) for name in ("step", "drafter", "config", "cursor")}
        (temporary / "trainer.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")
        for path in temporary.iterdir():
            _fsync(path)
        if final.exists():  # the run went back to an older checkpoint and came here again
            shutil.rmtree(final)
        os.replace(temporary, final)
        _fsync(folder)
        for old in _all(run)[:-keep]:
            shutil.rmtree(old)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            "the checkpoint could not be written",
            where=final,
            got=error,
            fix="free space or repair permissions, then run the same command again; it resumes",
        ) from error
    return final


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    found = _all(run)
    return found[-1] if found else None


def load(path: Path, *, map_location: str | torch.device = "cpu", with_optimizer: bool = True) -> Checkpoint:
    """Reads a checkpoint. Raises CheckpointError naming the file that is missing or damaged."""
    try:
        plain = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "weights.safetensors", device=str(map_location))
        optimizer = (
            torch.load(path / "optimizer.pt", map_location=map_location, weights_only=True) if with_optimizer else {}
        )
        return Checkpoint(
            weights={n.removeprefix("drafter."): t for n, t in tensors.items() if n.startswith("drafter.")},
            feature_scale=tensors["feature_scale"],
            optimizer=optimizer,
            **plain,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            "the checkpoint cannot be read",
            where=path,
            got=f"{type(error).__name__}: {error}",
            fix="remove this folder; the run then resumes from the checkpoint before it",
        ) from error


def _all(run: Path) -> list[Path]:
    folder = run / "checkpoints"
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
