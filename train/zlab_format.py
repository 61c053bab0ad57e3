"""The z-lab format: what SGLang, vLLM and the public `dflash` package read.

A flat Qwen3 config with the drafter's own settings in `dflash_config`; layer ids are 0-based; tensors have the
trainer's names, without embedding and output head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.drafter_config import DrafterConfig
from train.qwen3_keys import FULL, SLIDING, Mismatch, config_of, other_variants, qwen3_keys, refuse

ARCHITECTURE = "DFlashDraftModel"


def config_json(config: DrafterConfig) -> dict[str, Any]:
    """The config.json of an exported drafter.

    No `is_causal`: readers then make sliding layers causal inside the block and full ones not, as the trainer does.
    """
    return qwen3_keys(config) | {
        "architectures": [ARCHITECTURE],
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "num_target_layers": config.num_target_layers,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
    }


def config_from_json(plain: Mapping[str, Any], where: Path) -> DrafterConfig:
    """The inverse of `config_json`; also takes `block_size` inside `dflash_config` and theta in `rope_parameters`.

    Raises CheckpointError for missing keys, and naming every setting that the trainer's drafter does not follow.
    """
    nested: Mapping[str, Any] = plain.get("dflash_config") or {}
    block_sizes = [place["block_size"] for place in (plain, nested) if place.get("block_size") is not None]
    mismatches = other_variants(plain, nested)
    if len(set(block_sizes)) > 1:
        mismatches.append(Mismatch("block_size", block_sizes, "the same in both places"))
    given = {
        "block_size": block_sizes[0] if block_sizes else None,
        "mask_token_id": nested.get("mask_token_id"),
        "target_layer_ids": nested.get("target_layer_ids"),
    }
    refuse(mismatches, where)
    config = config_of(plain, given, where)
    refuse(_causality(config, plain, nested), where)
    return config


def _causality(config: DrafterConfig, *places: Mapping[str, Any]) -> list[Mismatch]:
    """Keys that make all layers causal in the block, or none: right only where all layers are of one kind."""
    kind = {True: FULL, False: SLIDING}  # the layers that a value contradicts
    return [
        Mismatch(key, place[key], f"absent: of these layers, those of {SLIDING} alone are causal in the block")
        for key in ("is_causal", "causal")
        for place in places
        if place.get(key) is not None and kind[bool(place[key])] in config.layer_types
    ]
