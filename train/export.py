"""Drafters as folders that serving engines load: the z-lab format, config.json and model.safetensors in bfloat16."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_tools.errors import CheckpointError, ConfigError
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig

ARCHITECTURE = "DFlashDraftModel"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
# Fields of DrafterConfig that the format keeps elsewhere than at the top level under the same name.
_NESTED = ("mask_token_id", "target_layer_ids")
# Settings of other DFlash variants: ignoring one would load a drafter that quietly drafts worse.
_UNSUPPORTED = (
    "is_causal",
    "causal",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "final_logit_softcapping",
    "output_multiplier",
    "input_embedding_scale",
    "rope_scaling",
)


def fold_feature_scale(drafter: DFlashDrafter, scale: Tensor) -> None:
    """Changes `fc` in place so that raw features do what features times `scale` [F * H] did before."""
    with torch.no_grad():
        drafter.fc.weight.mul_(scale.to(drafter.fc.weight))


def config_json(config: DrafterConfig) -> dict[str, Any]:
    """The config.json of an exported drafter."""
    sliding = config.sliding_window is not None
    return {
        "architectures": [ARCHITECTURE],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": "bfloat16",
        "eos_token_id": config.eos_token_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        # Readers that derive layer types from this instead of `layer_types` must not make layers slide by accident.
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        # Without it, transformers reads the window as none.
        "use_sliding_window": sliding,
        "vocab_size": config.vocab_size,
    }


def config_from_json(plain: dict[str, Any], where: Path) -> DrafterConfig:
    """The inverse of `config_json`; also takes `block_size` inside `dflash_config` and theta in `rope_parameters`.

    Raises CheckpointError for missing keys and for settings of other DFlash variants.
    """
    nested = plain.get("dflash_config") or {}
    rope = plain.get("rope_parameters") or {}
    unsupported = [key for key in _UNSUPPORTED if plain.get(key) is not None or nested.get(key) is not None]
    if rope.get("rope_type", "default") != "default":
        unsupported.append("rope_parameters.rope_type")
    if unsupported:
        raise CheckpointError(
            "the drafter uses settings of a DFlash variant that is not supported",
            where=where,
            got=", ".join(unsupported),
            expected="a plain DFlash drafter without these keys",
        )
    num_layers = plain.get("num_hidden_layers", 0)
    defaults = {
        "layer_types": ["full_attention"] * num_layers,
        "rope_theta": rope.get("rope_theta"),
        "block_size": nested.get("block_size"),
    }
    found = {f.name: nested.get(f.name) if f.name in _NESTED else plain.get(f.name) for f in fields(DrafterConfig)}
    values: dict[str, Any] = {name: defaults.get(name) if value is None else value for name, value in found.items()}
    optional = ("sliding_window", "eos_token_id", "pad_token_id")
    missing = [name for name, value in values.items() if value is None and name not in optional]
    if missing:
        raise CheckpointError("keys are missing in the drafter's config", where=where, expected=", ".join(missing))
    if "sliding_attention" not in values["layer_types"]:
        values["sliding_window"] = None  # files of all-full drafters may still name a window
    for name in ("layer_types", "target_layer_ids"):
        values[name] = tuple(values[name])
    eos = values["eos_token_id"]
    values["eos_token_id"] = eos[0] if isinstance(eos, list) else eos
    try:
        return DrafterConfig(**values)
    except ConfigError as error:
        raise CheckpointError(
            "the drafter's config contradicts itself", where=where, got=error.what, expected=error.expected
        ) from error


def export_drafter(drafter: DFlashDrafter, folder: Path) -> None:
    """Writes the drafter to `folder`, which appears only when complete. An earlier export there is replaced.

    Raises CheckpointError when `folder` holds something else, or the disk does not take it.
    """
    folder = folder.resolve()  # `.` has no name, and a link would be replaced instead of what it leads to
    if folder.exists() and not _is_export(folder):
        raise CheckpointError(
            "this folder holds something that is not an exported drafter",
            where=folder,
            expected="a new folder, an empty one, or an earlier export to replace",
        )
    temporary = folder.with_name(f".tmp-{os.getpid()}-{folder.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        weights = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
        save_file(weights, temporary / _WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(config_json(drafter.config), indent=2, sort_keys=True)
        (temporary / _CONFIG).write_text(text + "\n", encoding="utf-8")
        for path in (temporary / _WEIGHTS, temporary / _CONFIG, temporary):
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError("cannot write the exported drafter", where=folder, got=error) from error


def load_drafter(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> DFlashDrafter:
    """Reads an exported or published drafter.

    Raises CheckpointError when a file is missing or damaged, or the tensors are not exactly those of the config.
    """
    try:
        plain = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        weights = load_file(folder / _WEIGHTS)
        if not isinstance(plain, dict):
            raise ValueError(f"{_CONFIG} holds a {type(plain).__name__}, not an object")
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            "cannot read the drafter", where=folder, got=error, expected=f"{_CONFIG} and {_WEIGHTS}"
        ) from error
    config = config_from_json(plain, folder / _CONFIG)
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        first = wrong[0]
        raise CheckpointError(
            f"{len(wrong)} tensors do not fit the drafter's config",
            where=folder / _WEIGHTS,
            got=f"{first}: {found.get(first, 'missing')}",
            expected=f"{expected.get(first, 'no such tensor')}",
        )
    drafter.load_state_dict({name: tensor.to(device, dtype) for name, tensor in weights.items()}, assign=True)
    return drafter


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
    return names <= {_CONFIG, _WEIGHTS} and isinstance(plain, dict) and plain.get("architectures") == [ARCHITECTURE]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
