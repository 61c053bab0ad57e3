"""Draft layers that start as the target's last layers, where their shapes allow it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cache_tools.errors import TargetError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


def copy_last_layers(drafter: nn.Module, target_dir: Path, num_target_layers: int) -> list[str]:
    """Copies weights of the target's last layers into the drafter's layers of the same shape; returns their names.

    Draft layer i of n gets target layer N - n + i. Names are matched by what follows `layers.<i>.`, so any Llama- or
    Qwen-like target fits; parts without a twin of equal shape keep their random start.

    Raises TargetError when the folder has no safetensors, or not a single tensor fits.
    """
    wanted = {name: parameter for name, parameter in drafter.named_parameters() if _LAYER.search(name)}
    num_draft_layers = 1 + max(int(_layer(name)[0]) for name in wanted)
    shift = num_target_layers - num_draft_layers
    by_target_name = {(int(_layer(n)[0]) + shift, _layer(n)[1]): n for n in wanted}
    copied: list[str] = []
    with torch.no_grad():
        for file, names in _tensor_names(target_dir).items():
            for tensor_name in names:
                found = _LAYER.search(tensor_name)
                name = by_target_name.get((int(found[1]), found[2])) if found else None
                if name is None or "visual" in tensor_name or tensor_name.startswith("mtp."):
                    continue
                tensor = _read(file, tensor_name)
                if tensor.shape == wanted[name].shape:
                    wanted[name].copy_(tensor)
                    copied.append(name)
    if not copied:
        raise TargetError(
            "no layer of the target fits the drafter's shapes",
            where=target_dir,
            expected="layers with the drafter's head counts, head size and MLP width",
            fix="leave out --init-target, or give the drafter the target's shapes",
        )
    return sorted(copied)


def _layer(name: str) -> tuple[str, str]:
    found = _LAYER.search(name)
    assert found is not None
    return found[1], found[2]


def _tensor_names(target_dir: Path) -> dict[Path, list[str]]:
    index = target_dir / "model.safetensors.index.json"
    try:
        if index.exists():
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files: dict[Path, list[str]] = {}
            for name, file in weight_map.items():
                files.setdefault(target_dir / file, []).append(name)
            return files
        single = target_dir / "model.safetensors"
        with safe_open(single, framework="pt") as opened:
            return {single: list(opened.keys())}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise TargetError(
            "the target's weights cannot be read",
            where=target_dir,
            got=f"{type(error).__name__}: {error}",
            expected="model.safetensors, or model.safetensors.index.json with its files",
        ) from error


def _read(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor
    except (OSError, SafetensorError) as error:
        raise TargetError("the target's weights cannot be read", where=file, got=error) from error
