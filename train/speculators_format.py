"""The format of the speculators library, read by vLLM.

The layers' settings sit in `transformer_layer_config`, the target's name in `speculators_config`. Layer ids count
hidden states, of which the embedding's output is the first: id = 0-based layer + 1. Tensors have the trainer's names;
copies of the target's embedding and output head lie beside them, for readers that do not take them from the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cache_tools.errors import CheckpointError
from train.drafter_config import DrafterConfig
from train.qwen3_keys import SLIDING, Mismatch, config_of, other_variants, qwen3_keys, refuse
from train.target_folder import TargetFolder
from train.zlab_format import ARCHITECTURE

TYPE_KEY = "speculators_model_type"
_TYPE = "dflash"
_VERSION = "0.9.0"  # of the library whose format this is
# The target's own tensors that a checkpoint may hold.
BORROWED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def config_json(config: DrafterConfig, target: TargetFolder) -> dict[str, Any]:
    """The config.json of an exported drafter of `target`. Raises CheckpointError for a tap of the last layer."""
    refuse(_last_layer([i + 1 for i in config.target_layer_ids], config.num_target_layers))
    rotary = {"rope_theta": config.rope_theta, "rope_type": "default"}
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size - 1,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": [ARCHITECTURE],
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": "bfloat16",
        "mask_token_id": config.mask_token_id,
        # Not of the library, which looks it up in the target; lets this drafter be read where the target is not.
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": False,
        # vLLM makes all layers causal when this is false, so only drafters with sliding layers say so.
        "sliding_window_non_causal": SLIDING not in config.layer_types,
        "speculators_config": {
            "algorithm": _TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": target.architectures, "name_or_path": str(target.path)},
        },
        TYPE_KEY: _TYPE,
        "speculators_version": _VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        # `rope_theta` alone is what transformers 4 reads.
        "transformer_layer_config": qwen3_keys(config) | {"rope_parameters": rotary, "rope_theta": config.rope_theta},
    }


def target_tensors(config: DrafterConfig, target: TargetFolder) -> dict[str, Tensor]:
    """Copies [V, H] of the target's embedding and output head in bfloat16, under the format's names.

    Raises TargetError when they cannot be read or are of another shape.
    """
    embedding, head = target.embedding_and_head((config.vocab_size, config.hidden_size))
    return {
        "embed_tokens.weight": embedding.to(torch.bfloat16),
        "lm_head.weight": head.to(torch.bfloat16, copy=True),  # a tied one must not share memory in the file
    }


def config_from_json(plain: Mapping[str, Any], where: Path, num_target_layers: int | None = None) -> DrafterConfig:
    """The inverse of `config_json`; `num_target_layers` for files of the library, which do not say it.

    Raises CheckpointError for missing keys, and naming every setting that the trainer's drafter does not follow.
    """
    layers: Mapping[str, Any] = plain.get("transformer_layer_config") or {}
    ids = list(plain.get("aux_hidden_state_layer_ids") or ())
    mismatches = other_variants(plain, layers)
    if plain.get(TYPE_KEY) != _TYPE:
        mismatches.append(Mismatch(TYPE_KEY, plain.get(TYPE_KEY), _TYPE))
    if plain.get("sample_from_anchor"):
        mismatches.append(Mismatch("sample_from_anchor", True, "False: slot 0 holds the anchor and predicts nothing"))
    vocab_size, draft_vocab_size = layers.get("vocab_size"), plain.get("draft_vocab_size")
    if None not in (vocab_size, draft_vocab_size) and vocab_size != draft_vocab_size:
        expected = f"{vocab_size}, the target's whole vocabulary"
        mismatches.append(Mismatch("draft_vocab_size", draft_vocab_size, expected))
    if 0 in ids:
        mismatches.append(Mismatch("aux_hidden_state_layer_ids", ids, "1 or more: 0 is the embedding"))
    stored_layers = plain.get("num_target_layers")
    if None not in (stored_layers, num_target_layers) and stored_layers != num_target_layers:
        mismatches.append(Mismatch("num_target_layers", stored_layers, f"{num_target_layers}, the target's"))
    num_target_layers = num_target_layers or stored_layers
    if num_target_layers is None:
        raise CheckpointError(
            "this checkpoint does not say how many layers its target has",
            where=where,
            expected="num_target_layers",
            fix="give the target's folder: `dflash-train import --from CHECKPOINT --target TARGET --out DRAFTER`",
        )
    mismatches += _last_layer(ids, num_target_layers)
    refuse(mismatches, where)
    given = {
        "block_size": plain.get("block_size"),
        "mask_token_id": plain.get("mask_token_id"),
        "target_layer_ids": [i - 1 for i in ids] or None,
        "num_target_layers": num_target_layers,
    }
    config = config_of(layers, given, where)
    if plain.get("sliding_window_non_causal") and SLIDING in config.layer_types:
        expected = "False: sliding layers are causal in the block"
        refuse([Mismatch("sliding_window_non_causal", True, expected)], where)
    return config


def _last_layer(ids: list[int], num_target_layers: int) -> list[Mismatch]:
    """Readers differ in whether the last hidden state comes before or after the target's final norm."""
    if num_target_layers not in ids:
        return []
    return [Mismatch("aux_hidden_state_layer_ids", ids, f"less than {num_target_layers}, the target's last layer")]
