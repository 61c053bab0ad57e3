"""Training that starts from an existing drafter, provided that it is the one that the run would train."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from cache_tools.errors import CheckpointError
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.export import fold_feature_scale
from train.loading import load_any_drafter
from train.qwen3_keys import SLIDING

# Settings with a flag of their own. `layer_types` has one where sliding layers come first, the rest is the target's.
_FLAGS = {
    "block_size": "--block-size",
    "num_hidden_layers": "--num-draft-layers",
    "target_layer_ids": "--layer-ids",
    "sliding_window": "--sliding-window",
    "num_attention_heads": "--num-heads",
    "num_key_value_heads": "--num-kv-heads",
    "head_dim": "--head-dim",
    "intermediate_size": "--intermediate-size",
    "mask_token_id": "--mask-token-id",
}
# Nothing is computed from these.
_IGNORED = ("max_position_embeddings", "eos_token_id", "pad_token_id")


def start_from_drafter(drafter: DFlashDrafter, folder: Path, feature_scale: Tensor) -> None:
    """Copies the weights of the drafter in `folder`: an export, a published checkpoint, or a training run.

    `feature_scale` float32 [F*H] is what the run multiplies features by before `fc`, which is divided by it, so that
    the run starts with exactly what the checkpoint computes.

    Raises CheckpointError when it cannot be read, and naming every setting in which it is another drafter.
    """
    stored = load_any_drafter(folder, num_target_layers=drafter.config.num_target_layers)
    _refuse_differences(stored.config, drafter.config, folder)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(stored.get_parameter(name))
    fold_feature_scale(drafter, 1.0 / feature_scale)


def _refuse_differences(stored: DrafterConfig, wanted: DrafterConfig, folder: Path) -> None:
    names = [field.name for field in fields(DrafterConfig) if field.name not in _IGNORED]
    differing = [name for name in names if getattr(stored, name) != getattr(wanted, name)]
    if not differing:
        return
    flags = _flags(stored)
    fixes = []
    if chosen := dict.fromkeys(flags[name] for name in differing if name in flags):
        fixes.append(f"train with {' '.join(chosen)}")
    if of_target := [name for name in differing if name not in flags]:
        fixes.append(f"no flag sets {', '.join(of_target)}: start from a drafter of this target")
    raise CheckpointError(
        "the drafter to start from is not the one that this run trains",
        where=folder,
        got=", ".join(f"{name} {_shown(getattr(stored, name))}" for name in differing),
        expected=", ".join(f"{name} {_shown(getattr(wanted, name))}" for name in differing),
        fix="; ".join(fixes),
    )


def _flags(stored: DrafterConfig) -> dict[str, str]:
    """For every setting that flags can express, those that make a run train what is stored."""
    flags = {name: f"{flag} {_shown(getattr(stored, name))}" for name, flag in _FLAGS.items()}
    num_sliding = stored.layer_types.count(SLIDING)
    if SLIDING not in stored.layer_types[num_sliding:]:
        flags["layer_types"] = f"--num-sliding-layers {num_sliding}"
    if stored.sliding_window is None:
        flags["sliding_window"] = "--num-sliding-layers 0"
    return flags


def _shown(value: object) -> str:
    """As a flag takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
