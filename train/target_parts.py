"""What a drafter borrows from its target: embedding, output head and final norm, as the store keeps them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.reader import Store


@dataclass(frozen=True)
class FinalNorm:
    """The target's RMSNorm between its last layer and its output head, computed in float32."""

    weight: Tensor
    """float32 [H], as stored."""
    eps: float
    adds_one: bool
    """It multiplies by 1 + weight (Qwen3.5) instead of by weight."""

    def __call__(self, last_hidden: Tensor) -> Tensor:
        """Output of the target's last layer [..., H] -> input of its head, in the dtype of `last_hidden`."""
        wide = last_hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        weight = self.weight + 1 if self.adds_one else self.weight
        return (wide * scale * weight).to(last_hidden.dtype)


@dataclass(frozen=True)
class TargetParts:
    """Frozen weights of the target. V = vocabulary, H = hidden size."""

    embedding: Tensor
    """[V, H] input embedding."""
    lm_head: Tensor
    """[V, H] output head; the same tensor as `embedding` when the target ties them."""
    norm_weight: Tensor
    """[H] weight of the final norm as stored; see `norm`."""
    norm_eps: float
    norm_adds_one: bool
    """The norm multiplies by 1 + weight (Qwen3.5) instead of by weight."""

    @classmethod
    def from_store(
        cls, store: Store, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> TargetParts:
        """Reads the parts to a device and dtype. Raises StoreError when the store has no target weights yet."""
        attributes = store.target_attributes
        embedding = _tensor(store.target_array("embed_tokens"), device, dtype)
        return cls(
            embedding=embedding,
            lm_head=embedding if attributes.tied else _tensor(store.target_array("lm_head"), device, dtype),
            norm_weight=_tensor(store.target_array("final_norm"), device, torch.float32),
            norm_eps=attributes.norm_eps,
            norm_adds_one=attributes.norm_kind == "one_plus_weight",
        )

    @property
    def norm(self) -> FinalNorm:
        """The final norm by itself: whoever keeps it does not keep the embedding and the head."""
        return FinalNorm(self.norm_weight, self.norm_eps, self.norm_adds_one)


def reserved_tokens(store: Store) -> dict[int, str]:
    """End and padding tokens of the target by id, from every file that may name them, with that place as text."""
    plain = {name: _json_of(store, name) for name in ("config.json", "generation_config.json", "tokenizer_config.json")}
    found: dict[int, str] = {}
    for key in ("eos_token", "pad_token"):
        for name in ("config.json", "generation_config.json"):
            for holder in (plain[name], plain[name].get("text_config") or {}):
                ids = holder.get(f"{key}_id")
                found |= {i: f"{key}_id" for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}
        token = plain["tokenizer_config.json"].get(key)
        content = token.get("content") if isinstance(token, dict) else token
        for added in _json_of(store, "tokenizer.json").get("added_tokens") or []:
            if content is not None and added.get("content") == content:
                found[int(added["id"])] = f"{key}_id ({content})"
    return found


def _json_of(store: Store, name: str) -> dict[str, Any]:
    """A JSON file of the target; empty where the store has none."""
    if name not in store.target_files():
        return {}
    plain = json.loads(store.target_file(name).read_text(encoding="utf-8"))
    return plain if isinstance(plain, dict) else {}


def _tensor(stored: NDArray[Any], device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Stored uint16 bfloat16 bit patterns, or float32 values, as a tensor."""
    if stored.dtype == np.uint16:
        return torch.from_numpy(stored).view(torch.bfloat16).to(device=device, dtype=dtype)
    return torch.from_numpy(stored).to(device=device, dtype=dtype)
