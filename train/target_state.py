"""A target in the middle of a sequence: its cache, the features its tapped layers put out, and how to take tokens back.

Most caches can drop their last tokens. Recurrent states of linear-attention layers cannot, so for such targets the
state before a block is kept, and the accepted part of the block is run again from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache


class TargetState:
    """One sequence (batch 1) in a Hugging Face causal language model. A context manager: it hooks the tapped layers."""

    def __init__(self, target: Any, layer_ids: Sequence[int] = ()) -> None:
        self._target = target
        self._cache = DynamicCache(config=target.config.get_text_config())
        self._recurrent = any(_is_linear(layer) for layer in self._cache.layers)
        self._taps: list[Tensor] = [torch.empty(0)] * len(layer_ids)
        layers = target.get_decoder().layers
        self._handles = [layers[i].register_forward_hook(self._keep(slot)) for slot, i in enumerate(layer_ids)]
        self.length = 0

    def __enter__(self) -> TargetState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, slot: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._taps[slot] = output[0] if isinstance(output, tuple) else output

        return hook

    def prefill(self, tokens: Tensor) -> Tensor:
        """Runs the prompt [n]; logits [1, V] of its last position."""
        return self._forward(tokens, logits_to_keep=1)

    def extend(self, tokens: Tensor) -> Tensor:
        """Runs further tokens [n]; logits [n, V]."""
        return self._forward(tokens, logits_to_keep=0)

    def features(self) -> Tensor:
        """Outputs [n, F * H] of the tapped layers for the tokens of the last call, layers in the order given."""
        return torch.cat([tap[0] for tap in self._taps], dim=-1)

    def propose(self, tokens: Tensor) -> tuple[Tensor, Callable[[int], None]]:
        """Runs tokens [n] on trial: logits [n, V], and a function to be called with how many of them to keep."""
        restore = self._snapshot() if self._recurrent else None
        if restore is None:
            # Sliding-window layers must record what falls out of their window to get it back; until `keep` crops.
            self._cache.activate_past_recording()  # type: ignore[no-untyped-call]
        start = self.length
        logits = self.extend(tokens)

        def keep(num_tokens: int) -> None:
            removed = len(tokens) - num_tokens
            if restore is None:
                self._cache.crop(-removed)
                self.length -= removed
            elif removed:
                restore()
                self.length = start
                taps = list(self._taps)
                self.extend(tokens[:num_tokens])
                self._taps = taps

        return logits, keep

    def _forward(self, tokens: Tensor, logits_to_keep: int) -> Tensor:
        output = self._target(input_ids=tokens[None], cache=self._cache, use_cache=True, logits_to_keep=logits_to_keep)
        self.length += len(tokens)
        logits: Tensor = output.logits[0]
        return logits

    def _snapshot(self) -> Callable[[], None]:
        """Keeps the state of every layer; the returned function puts it back (once)."""
        # Attention layers grow by making new tensors, so holding the old ones is enough and costs nothing.
        # Linear-attention layers overwrite theirs.
        kept = []
        for layer in self._cache.layers:
            if _is_linear(layer):
                kept.append(
                    (layer, {name: _clones(getattr(layer, name)) for name in ("conv_states", "recurrent_states")})
                )
            else:
                names = ("keys", "values", "cumulative_length")
                kept.append((layer, {name: getattr(layer, name) for name in names if hasattr(layer, name)}))

        def restore() -> None:
            for layer, state in kept:
                for name, value in state.items():
                    setattr(layer, name, value)

        return restore


def _is_linear(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states")


def _clones(states: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
    return {index: None if state is None else state.clone() for index, state in states.items()}
