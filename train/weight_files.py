"""Tensors of a model folder: model.safetensors, or the files that model.safetensors.index.json names."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# What reading damaged or missing weights raises.
UNREADABLE = (OSError, ValueError, KeyError, SafetensorError)


def names_by_file(folder: Path) -> dict[Path, list[str]]:
    """The tensor names of each file. Raises one of `UNREADABLE`."""
    index = folder / INDEX
    if not index.exists():
        single = folder / WEIGHTS
        with safe_open(single, framework="pt") as opened:
            return {single: list(opened.keys())}
    files: dict[Path, list[str]] = {}
    weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    for name, file in weight_map.items():
        files.setdefault(folder / file, []).append(name)
    return files


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor in its stored type. Raises one of `UNREADABLE`."""
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder in their stored types. Raises one of `UNREADABLE`."""
    return {name: read_tensor(file, name) for file, names in names_by_file(folder).items() for name in names}
