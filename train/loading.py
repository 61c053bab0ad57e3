"""A drafter to evaluate or export, from a training run or from an exported folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cache_tools.errors import CheckpointError
from train import checkpoint as checkpoints
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.export import fold_feature_scale, load_drafter


def load_any_drafter(path: Path, *, num_target_layers: int | None = None) -> DFlashDrafter:
    """The drafter, in float32, of an exported or published folder, or of the newest checkpoint of a run.

    `num_target_layers` is for checkpoints of the speculators library, which do not say it. Raises CheckpointError for
    neither, and for what cannot be read.
    """
    if (path / "config.json").exists():
        return load_drafter(path, num_target_layers=num_target_layers, dtype=torch.float32)
    return drafter_of_run(path)


def drafter_of_run(run: Path) -> DFlashDrafter:
    """The newest checkpoint's drafter in float32, reading unscaled features: the feature scale is folded into `fc`.

    Of a run with --ema-decay, the averaged weights.
    """
    newest = checkpoints.latest(run)
    if newest is None:
        raise CheckpointError(
            "no drafter here",
            where=run,
            expected="config.json of an exported drafter, or checkpoints/step-N of a training run",
            fix="give the folder that `dflash-train run` or `dflash-train export` wrote",
        )
    checkpoint = checkpoints.load(newest, with_optimizer=False)
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in checkpoint.drafter.items()
    }
    drafter = DFlashDrafter(DrafterConfig(**plain))
    drafter.load_state_dict(checkpoint.trained)
    fold_feature_scale(drafter, checkpoint.feature_scale)
    return drafter.eval()
