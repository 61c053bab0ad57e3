"""The drafter class of transformers' own DFlash generation, `generate(..., speculation_type="dflash")`.

Its one class of this kind was made for another model family, but computes the same: same layers, other names for the
context projection, and 0-based layer ids. It attends both ways inside the block on every layer, so drafters with
sliding layers, which are causal there, have no place in it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from train.drafter_config import DrafterConfig
from train.qwen3_keys import FULL, SLIDING, Mismatch, refuse

ARCHITECTURE = "MuseGlimmerAssistantModel"
MODEL_TYPE = "muse_glimmer_assistant"
_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def config_json(config: DrafterConfig) -> dict[str, Any]:
    """The config.json of an exported drafter. Raises CheckpointError naming what the class cannot compute."""
    mismatches = []
    if SLIDING in config.layer_types:
        mismatches.append(Mismatch("layer_types", list(config.layer_types), f"{FULL} only in this format"))
    if config.num_target_layers - 1 in config.target_layer_ids:
        # transformers hands out the last hidden state after the target's final norm.
        expected = f"less than {config.num_target_layers - 1}, the target's last layer"
        mismatches.append(Mismatch("target_layer_ids", list(config.target_layer_ids), expected))
    refuse(mismatches)
    return {
        "architectures": [ARCHITECTURE],
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": config.eos_token_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": MODEL_TYPE,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "target_layer_ids": list(config.target_layer_ids),
    }


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The drafter's tensors under the names of the class."""
    return {_NAMES.get(name, name): tensor for name, tensor in tensors.items()}
