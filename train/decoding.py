"""Decoding, plain and speculative: a drafter proposes a block, the target verifies it in one pass.

Both run the same target code, so that they can be compared token for token and second for second.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from train.acceptance import Acceptance
from train.drafter import ContextCache, DFlashDrafter
from train.sampling import Chooser, Greedy
from train.target_parts import TargetParts
from train.target_state import TargetState


@dataclass(kw_only=True)
class Decoded(Acceptance):
    """One answer and what it cost. Times are in seconds; a step is one pass of the target after the prompt."""

    tokens: list[int] = field(default_factory=list)
    """The new tokens, an end token included."""
    prefill_seconds: float = 0.0
    """The prompt's pass, both models."""
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0

    @property
    def decode_seconds(self) -> float:
        """All time after the prompt's pass."""
        return self.target_seconds + self.drafter_seconds

    @property
    def decode_tokens(self) -> int:
        """Tokens made after the prompt's pass, which makes the first one."""
        return len(self.tokens) - 1


class _Clock:
    """Seconds since the last look, after waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last = self._now()

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def lap(self) -> float:
        last, self._last = self._last, self._now()
        return self._last - last


@torch.inference_mode()
def decode_plain(
    target: Any, prompt: Tensor, *, max_new_tokens: int, stop_ids: Collection[int], chooser: Chooser | None = None
) -> Decoded:
    """One pass of the target per token, by default greedily. `prompt` int64 [n], n >= 1; max_new_tokens >= 1."""
    chooser = chooser or Greedy()
    decoded = Decoded()
    clock = _Clock(prompt.device)
    with TargetState(target) as state:
        decoded.tokens.append(chooser.pick(state.prefill(prompt)[-1]))
        decoded.prefill_seconds = clock.lap()
        while len(decoded.tokens) < max_new_tokens and decoded.tokens[-1] not in stop_ids:
            logits = state.extend(prompt.new_tensor(decoded.tokens[-1:]))
            decoded.tokens.append(chooser.pick(logits[-1]))
            decoded.acceptance_lengths.append(1)
        decoded.target_seconds = clock.lap()
    return decoded


class SpeculativeDecoder:
    """Block-parallel speculative decoding of one sequence at a time. Greedily the answer is the target's own; drawn at
    a temperature it is distributed as the target's.

    `target` is a Hugging Face causal language model in eval mode; `parts` are its embedding and output head, as the
    drafter was trained with. All on one device.
    """

    def __init__(self, target: Any, drafter: DFlashDrafter, parts: TargetParts) -> None:
        self._target, self._drafter, self._parts = target, drafter, parts

    @torch.inference_mode()
    def decode(
        self, prompt: Tensor, *, max_new_tokens: int, stop_ids: Collection[int], chooser: Chooser | None = None
    ) -> Decoded:
        """The answer to `prompt` (int64 [n], n >= 1), at most `max_new_tokens` >= 1 tokens, up to a stop token."""
        chooser = chooser or Greedy()
        config = self._drafter.config
        decoded = Decoded.of_block_size(config.block_size)
        clock = _Clock(prompt.device)
        context = self._drafter.new_cache()
        with TargetState(self._target, config.target_layer_ids) as state:
            anchor = chooser.pick(state.prefill(prompt)[-1])
            decoded.tokens.append(anchor)
            features = state.features()
            decoded.prefill_seconds = clock.lap()
            while len(decoded.tokens) < max_new_tokens and anchor not in stop_ids:
                # The drafter sees positions before the anchor only: the anchor's own features do not exist yet.
                self._drafter.extend(context, features.to(self._drafter.fc.weight.dtype))
                drafts = chooser.draft(self._draft_logits(anchor, context))
                drafts = drafts.first(max_new_tokens - len(decoded.tokens) - 1)
                decoded.drafter_seconds += clock.lap()

                logits, keep = state.propose(torch.cat([prompt.new_tensor([anchor]), drafts.tokens]))
                num_accepted, bonus = chooser.verify(logits, drafts)
                gained = _until_stop([*drafts.tokens[:num_accepted].tolist(), bonus], stop_ids)
                keep(len(gained))
                features = state.features()[: len(gained)]
                decoded.target_seconds += clock.lap()

                _count(decoded, len(drafts.tokens), num_accepted, gained, stop_ids)
                decoded.tokens += gained
                anchor = gained[-1]
        return decoded

    def _draft_logits(self, anchor: int, context: ContextCache) -> Tensor:
        """The drafter's logits [B - 1, V] for the tokens after the anchor."""
        config, parts = self._drafter.config, self._parts
        block = torch.full((config.block_size,), config.mask_token_id, device=parts.embedding.device)
        block[0] = anchor
        embeds = parts.embedding[block].to(self._drafter.fc.weight.dtype)
        hidden = self._drafter.draft_block(embeds, context)[1:]
        return hidden.to(parts.lm_head.dtype) @ parts.lm_head.T


def _until_stop(tokens: list[int], stop_ids: Collection[int]) -> list[int]:
    """The tokens up to and with the first stop token."""
    stops = [i for i, token in enumerate(tokens) if token in stop_ids]
    return tokens[: stops[0] + 1] if stops else tokens


def _count(decoded: Decoded, num_drafts: int, num_accepted: int, gained: list[int], stop_ids: Collection[int]) -> None:
    """Records one step. Slots after the answer's end were never asked for and do not count."""
    if gained[-1] in stop_ids:
        num_drafts = min(num_drafts, len(gained))
        num_accepted = min(num_accepted, len(gained))
    decoded.count(num_drafts=num_drafts, num_accepted=num_accepted, num_gained=len(gained))
