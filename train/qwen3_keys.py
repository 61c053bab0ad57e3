"""The part of a drafter's config.json that z-lab and speculators checkpoints share: the keys of a Qwen3 model.

Both readers pass it through `Qwen3Config`, which reads the window as none without `use_sliding_window`, and makes up
`layer_types` from `max_window_layers` where they are missing; so all four keys are written, and read by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cache_tools.errors import CheckpointError, ConfigError
from train.drafter_config import DrafterConfig

FULL, SLIDING = "full_attention", "sliding_attention"

_OPTIONAL = ("sliding_window", "eos_token_id", "pad_token_id")
# What the drafter computes; a file that says otherwise needs another drafter, with the same tensors.
_FIXED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "partial_rotary_factor": 1.0}
# Settings of other DFlash variants: ignoring one would load a drafter that quietly drafts worse.
_OTHER_VARIANTS = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "final_logit_softcapping",
    "output_multiplier",
    "input_embedding_scale",
    "rope_scaling",
)


@dataclass(frozen=True)
class Mismatch:
    """A setting of a checkpoint that this drafter does not follow."""

    field: str
    got: object
    expected: object


def refuse(mismatches: Iterable[Mismatch], where: Path | None = None) -> None:
    """Raises CheckpointError naming every mismatch; returns when there is none."""
    found = list(mismatches)
    if found:
        raise CheckpointError(
            "the drafter's config asks for what is not supported",
            where=where,
            got=", ".join(f"{m.field} {m.got!r}" for m in found),
            expected=", ".join(f"{m.field} {m.expected}" for m in found),
        )


def qwen3_keys(config: DrafterConfig) -> dict[str, Any]:
    """The keys for `config`, rotary ones left out: the two formats write these differently."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
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
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_sliding_window": config.sliding_window is not None,
        "vocab_size": config.vocab_size,
    }


def other_variants(*places: Mapping[str, Any]) -> list[Mismatch]:
    """Keys in any of `places` that only other DFlash variants have."""
    return [
        Mismatch(key, place[key], "absent") for key in _OTHER_VARIANTS for place in places if place.get(key) is not None
    ]


def config_of(plain: Mapping[str, Any], given: Mapping[str, Any], where: Path) -> DrafterConfig:
    """The drafter of a config.json: `plain` are its Qwen3 keys, `given` what the format keeps elsewhere.

    Raises CheckpointError for missing keys, for settings that the drafter does not follow, and for contradictions.
    """
    refuse(_not_followed(plain), where)
    values: dict[str, Any] = {
        field.name: given[field.name] if field.name in given else plain.get(field.name)
        for field in fields(DrafterConfig)
    }
    if values["rope_theta"] is None:
        values["rope_theta"] = _rope(plain).get("rope_theta")
    if values["layer_types"] is None and values["num_hidden_layers"] is not None:
        values["layer_types"] = _layer_types(plain)
    missing = [name for name, value in values.items() if value is None and name not in _OPTIONAL]
    if missing:
        raise CheckpointError("keys are missing in the drafter's config", where=where, expected=", ".join(missing))
    if SLIDING not in values["layer_types"]:
        values["sliding_window"] = None  # files of all-full drafters may still name a window
    elif plain.get("use_sliding_window") is not True:
        refuse(
            [Mismatch("use_sliding_window", plain.get("use_sliding_window"), "True: there are sliding layers")], where
        )
    for name in ("layer_types", "target_layer_ids"):
        values[name] = tuple(values[name])
    eos = values["eos_token_id"]
    values["eos_token_id"] = eos[0] if isinstance(eos, list) else eos
    try:
        return DrafterConfig(**values)
    except ConfigError as error:
        raise CheckpointError(
            f"the drafter's config contradicts itself: {error.what}",
            where=where,
            got=error.got,
            expected=error.expected,
        ) from error


def _not_followed(plain: Mapping[str, Any]) -> list[Mismatch]:
    rope = _rope(plain)
    found = [
        Mismatch(name, place[name], expected)
        for name, expected in _FIXED.items()
        for place in (plain, rope)
        if place.get(name) is not None and place[name] != expected
    ]
    if rope.get("rope_type", "default") != "default":
        found.append(Mismatch("rope_parameters.rope_type", rope["rope_type"], "default"))
    return found


def _rope(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    return plain.get("rope_parameters") or {}


def _layer_types(plain: Mapping[str, Any]) -> list[str]:
    """What `Qwen3Config` makes of a file without `layer_types`."""
    num_layers = plain["num_hidden_layers"]
    windowed = plain.get("use_sliding_window") and plain.get("sliding_window") is not None
    first = plain.get("max_window_layers", 28) if windowed else num_layers
    return [SLIDING if i >= first else FULL for i in range(num_layers)]
