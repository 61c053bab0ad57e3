"""Checkpoints of a training run: a folder that exists is complete, and holds all that exact resumption needs."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_tools.errors import CheckpointError
from train.run_files import writing

_NAME = re.compile(r"(step|best)-\d{9}")
_PLAIN = ("step", "drafter", "config", "cursor", "order_hash", "num_unreadable", "validation")
_WEIGHTS, _OPTIMIZER = "weights.safetensors", "optimizer.pt"
# What the readers of JSON, safetensors and torch raise for damaged files.
_UNREADABLE = (
    OSError, EOFError, ValueError, AttributeError, KeyError, TypeError, RuntimeError, SafetensorError,
    pickle.UnpicklingError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything after `step` optimizer steps."""

    step: int
    weights: dict[str, Tensor]
    """fp32 master weights of the drafter by their exported names, in the parametrisation that is trained."""
    average: dict[str, Tensor] = field(default_factory=dict)
    """Running average of `weights`; empty for a run that keeps none."""
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
    order_hash: str = ""
    """Hash of which samples each step so far trained on, 16 hex digits."""
    num_unreadable: int = 0
    """Samples left out so far because they could not be read."""
    validation: dict[str, Any] = field(default_factory=dict)
    """What the held-out samples gave at this step; empty when they were not asked."""

    @property
    def trained(self) -> dict[str, Tensor]:
        """The weights to use the drafter with: their average if the run keeps one."""
        return self.average or self.weights


def save(run: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Writes `run/checkpoints/step-N` by temporary name, fsync and rename; then removes all but the `keep` newest.

    Raises CheckpointError when the disk does not take it; older checkpoints stay.
    """
    folder = run / "checkpoints"
    final = folder / f"step-{checkpoint.step:09d}"
    with writing(final):
        _save(final, checkpoint)
        for old in _all(folder)[:-keep]:
            _discard(old)
    return final


def save_best(run: Path, checkpoint: Checkpoint) -> Path:
    """Writes `run/checkpoints/best-N` like `save`, then removes the best one so far. It is to be exported, not resumed
    from: it has no optimizer. `checkpoint.validation` says how good it is. Raises CheckpointError as `save` does.
    """
    folder = run / "checkpoints"
    final = folder / f"best-{checkpoint.step:09d}"
    with writing(final):
        _save(final, replace(checkpoint, optimizer={}))
        for old in folder.glob("best-*"):
            if old != final:
                _discard(old)
    return final


def discard_best(run: Path) -> None:
    """Removes the best checkpoint, if there is one. Raises CheckpointError when the disk does not let it."""
    for path in (run / "checkpoints").glob("best-*"):
        with writing(path):
            _discard(path)


def _save(final: Path, checkpoint: Checkpoint) -> None:
    folder = final.parent
    temporary = folder / f".tmp-{os.getpid()}-{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temporary.mkdir()
        tensors = {f"drafter.{name}": tensor for name, tensor in checkpoint.weights.items()}
        tensors |= {f"average.{name}": tensor for name, tensor in checkpoint.average.items()}
        tensors["feature_scale"] = checkpoint.feature_scale
        save_file(
            {name: tensor.contiguous().cpu() for name, tensor in tensors.items()},
            temporary / _WEIGHTS,
        )
        _save_optimizer(checkpoint.optimizer, temporary / _OPTIMIZER)
        plain = {name: getattr(checkpoint, name) for name in _PLAIN}
        plain["crc32c"] = {name: _crc32c(temporary / name) for name in (_WEIGHTS, _OPTIMIZER)}
        (temporary / "trainer.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")
        for path in temporary.iterdir():
            _fsync(path)
        if final.exists():  # the run went back to an older checkpoint and came here again
            _discard(final)
        os.replace(temporary, final)
        _fsync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    found = _all(run / "checkpoints")
    return found[-1] if found else None


def best(run: Path) -> Path | None:
    """The checkpoint with the highest acceptance length on the held-out samples, or None.

    Raises CheckpointError for a damaged one.
    """
    # A kill may leave two. The first to reach a value stays the best.
    found = sorted(path for path in (run / "checkpoints").glob("best-*") if _NAME.fullmatch(path.name))
    return max(found, key=lambda path: acceptance_length_of(read_plain(path)), default=None)


def acceptance_length_of(plain: Mapping[str, Any]) -> float:
    """The held-out acceptance length that a checkpoint's `read_plain` holds, in tokens; 0 without one."""
    return float(plain["validation"].get("acceptance_length") or 0.0)


def read_plain(path: Path) -> dict[str, Any]:
    """All of a checkpoint but its tensors, by the names of `Checkpoint`. Raises CheckpointError."""
    with _reading(path):
        plain: dict[str, Any] = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
        return plain


def load(path: Path, *, map_location: str | torch.device = "cpu", with_optimizer: bool = True) -> Checkpoint:
    """Reads a checkpoint. Raises CheckpointError naming the file that is missing or damaged."""
    with _reading(path):
        plain = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
        for name, expected in plain.pop("crc32c").items():
            if (with_optimizer or name != _OPTIMIZER) and _crc32c(path / name) != expected:
                raise ValueError(f"the checksum of {name} is wrong")
        tensors = load_file(path / _WEIGHTS, device=str(map_location))
        optimizer = (
            torch.load(path / _OPTIMIZER, map_location=map_location, weights_only=True) if with_optimizer else {}
        )
        return Checkpoint(
            weights={n.removeprefix("drafter."): t for n, t in tensors.items() if n.startswith("drafter.")},
            average={n.removeprefix("average."): t for n, t in tensors.items() if n.startswith("average.")},
            feature_scale=tensors["feature_scale"],
            optimizer=optimizer,
            **plain,
        )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise CheckpointError(
            "the checkpoint cannot be read",
            where=path,
            got=f"{type(error).__name__}: {error}",
            fix="remove this folder; the run then resumes from the checkpoint before it",
        ) from error


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path)


def _save_optimizer(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # what torch makes of a full disk does not say so
        raise OSError(f"torch cannot write {path.name}, the disk may be full ({error})") from error


def _discard(path: Path) -> None:
    """Deletes a checkpoint; a kill in the middle leaves no folder that looks complete."""
    doomed = path.with_name(f".tmp-{os.getpid()}-old-{path.name}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def _crc32c(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            value = google_crc32c.extend(value, piece)
    return f"{value:08x}"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
