"""Quantised layers of a batch, made where the target runs: the host only has to write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.manifest import Manifest
from cache_tools.quantise import QUANTISED, parts
from cache_tools.reader import Store
from precompute.quantise import quantise


def encoded_layers(store: Store, layers: Sequence[Tensor]) -> list[Tensor]:
    """All parts [N, ...] of the first layer, then of the second, and so on; nothing for a lossless codec.

    `layers`: bfloat16 [N, hidden_size] of each tapped layer, on any device. Samples with values that are not finite get
    meaningless codes; they are rejected before anything is written.
    """
    if store.manifest.codec not in QUANTISED:
        return []
    encoded: list[Tensor] = []
    for layer_id, states in zip(store.layer_ids, layers, strict=True):
        scale = torch.from_numpy(store.channel_scales[layer_id]).to(states.device)
        encoded += quantise(store.manifest.codec, states, scale).values()
    return encoded


def by_layer(manifest: Manifest, arrays: Sequence[NDArray[Any]]) -> dict[int, dict[str, NDArray[Any]]]:
    """The arrays of `encoded_layers` by layer id and name."""
    if manifest.codec not in QUANTISED:
        return {}
    names = list(parts(manifest.codec, manifest.target.hidden_size))
    return {
        layer_id: dict(zip(names, arrays[first : first + len(names)], strict=True))
        for layer_id, first in zip(manifest.layer_ids, range(0, len(arrays), len(names)), strict=True)
    }
