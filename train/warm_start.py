"""Drafters that start from what the target already knows: its last layers, and its output norm.

Measured on the demo after equal steps (held-out loss in nats): random start with copied layers 5.26, with the target's
final norm and `fc` reading the deepest tap 4.81.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cache_tools.errors import TargetError
from train.drafter import INIT_STD, DFlashDrafter
from train.target_folder import is_text
from train.target_parts import TargetParts
from train.weight_files import UNREADABLE, names_by_file, read_tensor

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
# Share of its output that `fc` takes from a random mix of all taps at the start; the rest is the deepest tap.
_RANDOM_SHARE = 0.1

# What must be equal for a folder to hold the target of a store, or a sibling of it such as its base model.
_SHAPE_KEYS = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


def copy_last_layers(
    drafter: nn.Module, target_dir: Path, target_config: Mapping[str, Any], *, norm_adds_one: bool = False
) -> list[str]:
    """Copies weights of the target's last layers into the drafter's layers of the same shape; returns their names.

    Draft layer i of n gets target layer N - n + i. Names are matched by what follows `layers.<i>.`, so any Llama- or
    Qwen-like target fits; parts without a twin of equal shape keep their random start. With `norm_adds_one` the
    target's norms multiply by 1 + weight, a drafter's by weight.

    Raises TargetError when the folder has no safetensors, holds another model than `target_config` describes, or not
    a single tensor fits.
    """
    text = target_config.get("text_config", target_config)
    _check_target(target_dir, text)
    wanted = {name: parameter for name, parameter in drafter.named_parameters() if _LAYER.search(name)}
    num_draft_layers = 1 + max(int(_layer(name)[0]) for name in wanted)
    shift = int(text["num_hidden_layers"]) - num_draft_layers
    by_target_name = {(int(_layer(n)[0]) + shift, _layer(n)[1]): n for n in wanted}
    copied: list[str] = []
    with torch.no_grad():
        for file, names in _tensor_names(target_dir).items():
            for tensor_name in names:
                found = _LAYER.search(tensor_name)
                name = by_target_name.get((int(found[1]), found[2])) if found else None
                if name is None or not is_text(tensor_name):
                    continue
                tensor = _read(file, tensor_name)
                if tensor.shape == wanted[name].shape:
                    wanted[name].copy_(tensor.float() + 1 if norm_adds_one and tensor.ndim == 1 else tensor)
                    copied.append(name)
    if not copied:
        raise TargetError(
            "no layer of the target fits the drafter's shapes",
            where=target_dir,
            expected="layers with the drafter's head counts, head size and MLP width",
            fix="leave out --init-target, or give the drafter the target's shapes",
        )
    return sorted(copied)


@torch.no_grad()
def use_target_norm(drafter: DFlashDrafter, parts: TargetParts) -> None:
    """The drafter's last norm starts as the target's: the frozen head then meets inputs of the scale it was made for.

    With a norm of ones the first loss can be many times that of a uniform guess.
    """
    drafter.norm.weight.copy_(parts.norm_weight + 1 if parts.norm_adds_one else parts.norm_weight)


@torch.no_grad()
def read_deepest_tap(drafter: DFlashDrafter, feature_scale: Tensor) -> None:
    """`fc` and `hidden_norm` start so that context rows are nearly the deepest tapped hidden state, normed as the first
    draft layer norms its input: what layers copied from the target expect to make keys and values of.

    `feature_scale` float32 [F*H] is what features are multiplied by before `fc`.
    """
    width, taps = drafter.config.hidden_size, drafter.config.target_layer_ids
    first = width * taps.index(max(taps))
    channels = slice(first, first + width)
    deepest = drafter.fc.weight[:, channels]
    size = 1.0 / feature_scale[channels]  # RMS of every channel of the deepest tap
    rms = float(size.square().mean().sqrt())
    # Scaled features have RMS one, so a random row of `fc` gives INIT_STD * sqrt(F*H).
    drafter.fc.weight.mul_(_RANDOM_SHARE * rms / (INIT_STD * drafter.fc.weight.shape[1] ** 0.5))
    deepest += torch.diag(size)
    drafter.hidden_norm.weight.copy_(drafter.draft_layers()[0].input_layernorm.weight)


def _check_target(target_dir: Path, expected: Mapping[str, Any]) -> None:
    path = target_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        found = {key: text.get(key) for key in _SHAPE_KEYS}
    except (OSError, ValueError, AttributeError) as error:
        raise TargetError(
            "no target model here", where=path, got=error, expected="the folder of the store's target"
        ) from error
    differing = [key for key in _SHAPE_KEYS if found[key] != expected.get(key)]
    if differing:
        raise TargetError(
            "this is not the target that the store was made with",
            where=target_dir,
            got=", ".join(f"{key} {found[key]}" for key in differing),
            expected=", ".join(f"{key} {expected.get(key)}" for key in differing),
            fix="give --init-target the store's target",
        )


def _layer(name: str) -> tuple[str, str]:
    found = _LAYER.search(name)
    assert found is not None
    return found[1], found[2]


def _tensor_names(target_dir: Path) -> dict[Path, list[str]]:
    try:
        return names_by_file(target_dir)
    except UNREADABLE as error:
        raise TargetError(
            "the target's weights cannot be read",
            where=target_dir,
            got=f"{type(error).__name__}: {error}",
            expected="model.safetensors, or model.safetensors.index.json with its files",
        ) from error


def _read(file: Path, name: str) -> Tensor:
    try:
        return read_tensor(file, name)
    except UNREADABLE as error:
        raise TargetError("the target's weights cannot be read", where=file, got=error) from error
