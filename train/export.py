"""Drafters as folders that serving engines load: config.json and model.safetensors in bfloat16.

Of three formats, z-lab is the usual one, speculators is read and written, transformers only written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cache_tools.errors import CheckpointError, ConfigError
from train import speculators_format, transformers_format, zlab_format
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.target_folder import TargetFolder
from train.weight_files import UNREADABLE, WEIGHTS, read_tensors

Format = Literal["z-lab", "speculators", "transformers"]

_CONFIG = "config.json"
_ARCHITECTURES = ([zlab_format.ARCHITECTURE], [transformers_format.ARCHITECTURE])


def fold_feature_scale(drafter: DFlashDrafter, scale: Tensor) -> None:
    """Changes `fc` in place so that raw features do what features times `scale` [F * H] did before."""
    with torch.no_grad():
        drafter.fc.weight.mul_(scale.to(drafter.fc.weight))


def export_drafter(
    drafter: DFlashDrafter, folder: Path, *, format: Format = "z-lab", target: TargetFolder | None = None
) -> int:
    """Writes the drafter to `folder`, which appears only when complete; returns the number of tensors.

    An earlier export there is replaced. `target`, needed by the speculators format alone, must be the drafter's target.

    Raises ConfigError without a target where one is needed, TargetError for one that does not fit, CheckpointError when
    the format cannot hold this drafter, `folder` holds something else, or the disk does not take it.
    """
    folder = folder.resolve()  # `.` has no name, and a link would be replaced instead of what it leads to
    if folder.exists() and not _is_export(folder):
        raise CheckpointError(
            "this folder holds something that is not an exported drafter",
            where=folder,
            expected="a new folder, an empty one, or an earlier export to replace",
        )
    if target is not None:
        target.require_fit(drafter.config)
    weights = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
    if format == "z-lab":
        plain = zlab_format.config_json(drafter.config)
    elif format == "transformers":
        plain = transformers_format.config_json(drafter.config)
        weights = transformers_format.renamed(weights)
    else:
        if target is None:
            raise ConfigError(
                "the speculators format holds copies of the target's embedding and output head",
                fix="give the target's folder with --target",
            )
        plain = speculators_format.config_json(drafter.config, target)
        weights |= speculators_format.target_tensors(drafter.config, target)
    _write(folder, plain, weights)
    return len(weights)


def load_drafter(
    folder: Path,
    *,
    num_target_layers: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> DFlashDrafter:
    """Reads an exported or published drafter in the z-lab or the speculators format.

    `num_target_layers` is for checkpoints of the speculators library, which do not say it.

    Raises CheckpointError when a file is missing or damaged, the config asks for what the drafter does not do, or the
    tensors are not exactly those of the config.
    """
    path = folder / _CONFIG
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        weights = read_tensors(folder)
        if not isinstance(plain, dict):
            raise ValueError(f"{_CONFIG} holds a {type(plain).__name__}, not an object")
    except UNREADABLE as error:
        raise CheckpointError(
            "cannot read the drafter", where=folder, got=error, expected=f"{_CONFIG} and {WEIGHTS}"
        ) from error
    config = _config_from_json(plain, path, num_target_layers)
    if speculators_format.TYPE_KEY in plain:
        weights = {name: tensor for name, tensor in weights.items() if name not in speculators_format.BORROWED}
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        first = wrong[0]
        raise CheckpointError(
            f"{len(wrong)} tensors do not fit the drafter's config",
            where=folder,
            got=f"{first}: {found.get(first, 'missing')}",
            expected=f"{expected.get(first, 'no such tensor')}",
        )
    drafter.load_state_dict({name: tensor.to(device, dtype) for name, tensor in weights.items()}, assign=True)
    return drafter


def _config_from_json(plain: Mapping[str, Any], path: Path, num_target_layers: int | None) -> DrafterConfig:
    if speculators_format.TYPE_KEY in plain:
        return speculators_format.config_from_json(plain, path, num_target_layers)
    if plain.get("model_type") == transformers_format.MODEL_TYPE:
        raise CheckpointError(
            "this drafter is in the format of transformers, which is only written",
            where=path,
            got=f"model_type {transformers_format.MODEL_TYPE}",
            fix="export the drafter once more with --format z-lab",
        )
    return zlab_format.config_from_json(plain, path)


def _write(folder: Path, plain: dict[str, Any], weights: dict[str, Tensor]) -> None:
    temporary = folder.with_name(f".tmp-{os.getpid()}-{folder.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(plain, indent=2, sort_keys=True)
        (temporary / _CONFIG).write_text(text + "\n", encoding="utf-8")
        for path in (temporary / WEIGHTS, temporary / _CONFIG, temporary):
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError("cannot write the exported drafter", where=folder, got=error) from error


def _is_export(folder: Path) -> bool:
    """True for an empty folder too. Other models consist of the same two files, so names are not enough."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    try:
        plain = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return names <= {_CONFIG, WEIGHTS} and isinstance(plain, dict) and plain.get("architectures") in _ARCHITECTURES


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
