"""The shape of a drafter, checked when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cache_tools.errors import ConfigError
from cache_tools.layer_ids import default_layer_ids

LAYER_TYPES = ("full_attention", "sliding_attention")

# Published drafters keep this head shape for targets with wider heads than 128 (Qwen3.5: 24/4/256): engines
# want the drafter's cache pages to match their kernels, and existing checkpoints can then be warm-started.
_WIDE_HEAD_TARGETS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Hugging Face names where they exist. Raises ConfigError for what cannot work."""

    hidden_size: int
    """Width, equal to the target's."""
    intermediate_size: int
    """Width of the SwiGLU."""
    num_hidden_layers: int
    """Draft layers."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads; divides the query heads."""
    head_dim: int
    """Width of a head; even."""
    vocab_size: int
    """Tokens of the target's vocabulary."""
    block_size: int
    """Slots of a block, the anchor's included: a block proposes `block_size - 1` tokens."""
    mask_token_id: int
    """The token in slots 1.. of a block. Training, export and serving must agree on it."""
    target_layer_ids: tuple[int, ...]
    """0-based target layers whose outputs are the context features, in the order of concatenation."""
    num_target_layers: int
    """Layers of the target."""
    rope_theta: float
    """Rotary base, the target's; every channel of a head is rotated."""
    rms_norm_eps: float = 1e-6
    """Epsilon of every norm."""
    layer_types: tuple[str, ...]
    """full_attention or sliding_attention, one entry per draft layer."""
    sliding_window: int | None = None
    """Tokens that a sliding layer sees, the query's own included; None without sliding layers."""
    max_position_embeddings: int = 32768
    """Longest position that serving engines should plan for; nothing is computed from it."""
    eos_token_id: int | None = None
    """The target's end token, if known."""
    pad_token_id: int | None = None
    """The target's padding token, if known."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_taps()
        self._check_layers()
        self._check_mask_token()

    def window(self, layer: int) -> int | None:
        """The sliding window of a draft layer, or None for a full layer."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def _check_sizes(self) -> None:
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*names, "num_key_value_heads", "head_dim", "vocab_size", "num_target_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive", got=getattr(self, name), expected="1 or more")
        if self.block_size < 2:
            raise ConfigError(
                "block_size must leave room for one draft token", got=self.block_size, expected="2 or more"
            )
        if self.head_dim % 2:
            raise ConfigError("head_dim must be even for rotary positions", got=self.head_dim)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "num_attention_heads must be a multiple of num_key_value_heads",
                got=f"{self.num_attention_heads} and {self.num_key_value_heads}",
            )

    def _check_taps(self) -> None:
        if not self.target_layer_ids:
            raise ConfigError("target_layer_ids is empty", expected="at least one 0-based layer of the target")
        outside = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if outside or len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ConfigError(
                "target_layer_ids must be distinct 0-based layers of the target",
                got=list(self.target_layer_ids),
                expected=f"0 to {self.num_target_layers - 1}, each at most once",
            )

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                "layer_types must name every draft layer",
                got=f"{len(self.layer_types)} entries",
                expected=f"{self.num_hidden_layers} entries",
            )
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown:
            raise ConfigError("unknown layer type", got=unknown, expected=list(LAYER_TYPES))
        has_sliding = "sliding_attention" in self.layer_types
        if has_sliding != (self.sliding_window is not None):
            raise ConfigError(
                "sliding_window and layer_types disagree",
                got=f"sliding_window {self.sliding_window}, layer_types {list(self.layer_types)}",
                expected="a window exactly when some layer is sliding_attention",
            )
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ConfigError(
                "sliding_window must cover a whole block",
                got=self.sliding_window,
                expected=f"{self.block_size} (block_size) or more",
            )

    def _check_mask_token(self) -> None:
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                "mask_token_id is not in the target's vocabulary",
                got=self.mask_token_id,
                expected=f"0 to {self.vocab_size - 1}",
            )
        for name in ("eos_token_id", "pad_token_id"):
            if getattr(self, name) == self.mask_token_id:
                raise ConfigError(
                    f"mask_token_id is the target's {name}",
                    got=self.mask_token_id,
                    expected="a token that never occurs in conversations",
                    fix="choose a reserved special token of the tokenizer",
                )

    @classmethod
    def for_target(
        cls,
        target_config: Mapping[str, Any],
        *,
        num_layers: int,
        block_size: int,
        mask_token_id: int,
        target_layer_ids: tuple[int, ...] | None = None,
        layer_types: tuple[str, ...] | None = None,
        sliding_window: int | None = None,
        intermediate_size: int | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
    ) -> DrafterConfig:
        """The drafter of a target from the target's config.json (`text_config` inside a multimodal one).

        What is not given comes from the target, except: taps by the usual rule; with a window and no
        `layer_types` every layer but the last slides; a target with heads wider than 128 gets 32 query and 8
        key heads of 128. The mask token has no default: no rule finds an unused token in every vocabulary.

        Raises ConfigError when the target's config lacks a needed key or values do not fit together.
        """
        text = target_config.get("text_config", target_config)
        num_target_layers = _need(text, "num_hidden_layers")
        heads = _head_shape(text)
        if layer_types is None:
            sliding = num_layers - 1 if sliding_window is not None else 0
            layer_types = ("sliding_attention",) * sliding + ("full_attention",) * (num_layers - sliding)
        return cls(
            hidden_size=_need(text, "hidden_size"),
            intermediate_size=intermediate_size or _need(text, "intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_attention_heads or heads["num_attention_heads"],
            num_key_value_heads=num_key_value_heads or heads["num_key_value_heads"],
            head_dim=head_dim or heads["head_dim"],
            vocab_size=_need(text, "vocab_size"),
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=target_layer_ids or default_layer_ids(num_target_layers, num_layers),
            num_target_layers=num_target_layers,
            rope_theta=_rope_theta(text),
            rms_norm_eps=_need(text, "rms_norm_eps"),
            layer_types=layer_types,
            sliding_window=sliding_window,
            max_position_embeddings=text.get("max_position_embeddings", 32768),
            eos_token_id=_first_id(target_config.get("eos_token_id", text.get("eos_token_id"))),
            pad_token_id=_first_id(target_config.get("pad_token_id", text.get("pad_token_id"))),
        )


def _need(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ConfigError("the target's config.json lacks a key that the drafter's shape needs", expected=key)
    return config[key]


def _head_shape(text: Mapping[str, Any]) -> Mapping[str, int]:
    num_heads = _need(text, "num_attention_heads")
    head_dim = text.get("head_dim") or _need(text, "hidden_size") // num_heads
    if head_dim > 128:
        return _WIDE_HEAD_TARGETS
    num_kv_heads = text.get("num_key_value_heads") or num_heads
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def _rope_theta(text: Mapping[str, Any]) -> float:
    """From `rope_theta` (older files) or `rope_parameters`, there possibly one entry per layer type."""
    parameters = text.get("rope_parameters") or {}
    parameters = parameters.get("full_attention", parameters)
    theta = text.get("rope_theta", parameters.get("rope_theta"))
    if theta is None:
        raise ConfigError(
            "the target's config.json does not say its rotary base", expected="rope_theta or rope_parameters"
        )
    return float(theta)


def _first_id(ids: int | list[int] | None) -> int | None:
    return ids[0] if isinstance(ids, list) and ids else ids if isinstance(ids, int) else None
