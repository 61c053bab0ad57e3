"""The target's folder as training meets it: its config, and the weights that a drafter borrows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cache_tools.errors import TargetError
from train.drafter_config import DrafterConfig
from train.weight_files import UNREADABLE, names_by_file, read_tensor

# What a drafter and its target must agree on.
_SHARED = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_hidden_layers": "num_target_layers"}


@dataclass(frozen=True)
class TargetFolder:
    """A Hugging Face model folder whose config.json was read."""

    path: Path
    """Absolute."""
    config: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> TargetFolder:
        """Raises TargetError when there is no config.json."""
        file = path / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError(f"holds a {type(config).__name__}, not an object")
        except (OSError, ValueError) as error:
            raise TargetError(
                "no target model here", where=file, got=error, expected="a model's config.json"
            ) from error
        return cls(path.resolve(), config)

    @property
    def text_config(self) -> dict[str, Any]:
        """Of a multimodal model the part about text."""
        text: dict[str, Any] = self.config.get("text_config", self.config)
        return text

    @property
    def architectures(self) -> list[str]:
        return list(self.config.get("architectures") or ())

    @property
    def num_layers(self) -> int:
        """Raises TargetError when the config does not say."""
        number = self.text_config.get("num_hidden_layers")
        if not isinstance(number, int):
            raise TargetError("the target's config lacks a key", where=self.path, expected="num_hidden_layers")
        return number

    def require_fit(self, drafter: DrafterConfig) -> None:
        """Raises TargetError naming every size in which this is not the drafter's target."""
        text = self.text_config
        differing = [name for name, ours in _SHARED.items() if text.get(name) != getattr(drafter, ours)]
        if differing:
            raise TargetError(
                "this is not the target of the drafter",
                where=self.path,
                got=", ".join(f"{name} {text.get(name)}" for name in differing),
                expected=", ".join(f"{name} {getattr(drafter, _SHARED[name])}" for name in differing),
                fix="give --target the folder of the model that the drafter was trained for",
            )

    def embedding_and_head(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Input embedding and output head, each `shape` [V, H], in their stored type; one tensor when they are tied.

        Raises TargetError when they cannot be read, or have another shape.
        """
        untied = self.text_config.get("tie_word_embeddings", self.config.get("tie_word_embeddings")) is False
        try:
            files = {name: file for file, names in names_by_file(self.path).items() for name in names if is_text(name)}
            embedding = _read_one(files, "embed_tokens.weight")
            has_head = any(name.endswith("lm_head.weight") for name in files)
            head = _read_one(files, "lm_head.weight") if has_head or untied else embedding
        except UNREADABLE as error:
            raise TargetError(
                "the target's embedding and output head cannot be read",
                where=self.path,
                got=f"{type(error).__name__}: {error}",
                expected="embed_tokens.weight, and lm_head.weight unless they are tied, in safetensors files",
            ) from error
        for name, tensor in (("embed_tokens.weight", embedding), ("lm_head.weight", head)):
            if tuple(tensor.shape) != shape:
                raise TargetError(
                    f"the target's {name} has another shape", where=self.path, got=tuple(tensor.shape), expected=shape
                )
        return embedding, head


def is_text(tensor_name: str) -> bool:
    """False for tensors of vision towers and of next-token heads, whose layers are named like the text model's."""
    return "visual" not in tensor_name and not tensor_name.startswith("mtp.")


def _read_one(files: dict[str, Path], ending: str) -> Tensor:
    """The tensor with the shortest of the names that end so."""
    name = min((name for name in files if name.endswith(ending)), key=len, default=None)
    if name is None:
        raise KeyError(ending)
    return read_tensor(files[name], name)
