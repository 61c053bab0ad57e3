"""A drafter to evaluate or export, from a training run or from an exported folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from cache_tools.errors import CheckpointError, ConfigError
from train import checkpoint as checkpoints
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.export import fold_feature_scale, load_drafter

Which = Literal["last", "best"]


def load_any_drafter(path: Path, which: Which = "last", *, num_target_layers: int | None = None) -> DFlashDrafter:
    """The drafter, in float32, of an exported or published folder, or of a checkpoint of a run.

    `num_target_layers` is for checkpoints of the speculators library, which do not say it. Raises CheckpointError for
    neither, and for what cannot be read; ConfigError when the best checkpoint of an exported drafter is asked for.
    """
    if not is_exported(path):
        return drafter_of_run(path, which)
    if which == "best":
        raise ConfigError(
            "an exported drafter has no checkpoints to choose from",
            where=path,
            got="--checkpoint best",
            fix="leave out --checkpoint, or give the folder of the training run",
        )
    return load_drafter(path, num_target_layers=num_target_layers, dtype=torch.float32)


def is_exported(path: Path) -> bool:
    """Whether a folder is an exported drafter and not a training run."""
    return (path / "config.json").exists()


def drafter_of_run(run: Path, which: Which = "last") -> DFlashDrafter:
    """The newest checkpoint's drafter, or that of the best one, in float32. It reads unscaled features: the feature
    scale is folded into `fc`. Of a run with --ema-decay, the averaged weights. Raises CheckpointError.
    """
    checkpoint = checkpoints.load(checkpoint_of(run, which), with_optimizer=False)
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in checkpoint.drafter.items()
    }
    drafter = DFlashDrafter(DrafterConfig(**plain))
    drafter.load_state_dict(checkpoint.trained)
    fold_feature_scale(drafter, checkpoint.feature_scale)
    return drafter.eval()


def checkpoint_of(run: Path, which: Which) -> Path:
    """The newest checkpoint of a run, or the best one. Raises CheckpointError when there is none."""
    newest = checkpoints.latest(run)
    if newest is None:
        raise CheckpointError(
            "no drafter here",
            where=run,
            expected="config.json of an exported drafter, or checkpoints/step-N of a training run",
            fix="give the folder that `dflash-train run` or `dflash-train export` wrote",
        )
    found = newest if which == "last" else checkpoints.best(run)
    if found is None:
        raise CheckpointError(
            "this run has no best checkpoint: it was not validated",
            where=run,
            fix="leave out --checkpoint best; or train with --validation-share",
        )
    return found
