"""Block decoding along stored answers: what speculative decoding would do had the target said just these tokens.

A drafter is trained on context features that the store holds, and decodes with the same ones. So the store can play the
target: a draft is accepted when it is the stored token. The result is exact for answers that the target generated
greedily; for others, where the target would have said something else, it is an estimate.

Letters: T = tokens of a pack, F = tapped layers, H = hidden size, B = block size, n = answers still being walked,
V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from train.acceptance import Acceptance
from train.anchors import block_tokens
from train.attention import BlockLayout
from train.batches import Pack
from train.drafter import DFlashDrafter

# Logits that exist at a time: 1 GB in float32.
_SLICE_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Spans:
    """The answers of a pack, ascending. An answer is an unbroken row of supervised tokens in one document."""

    first: NDArray[np.int64]
    """Pack row of each answer's first token: the target's prompt pass makes it, and it is the first anchor."""
    last: NDArray[np.int64]
    """Pack row of its last token."""
    cut: NDArray[np.bool_]
    """The answer goes on after `last`, which a limit set. Then, as in decoding with that limit, the last token is
    never drafted; an answer's real end may be."""


def answer_spans(
    loss_mask: NDArray[np.bool_], cu_seqlens: NDArray[np.integer], *, max_new_tokens: int | None = None
) -> Spans:
    """The answers of a pack, cut after `max_new_tokens` tokens: loss_mask [T], cu_seqlens [D + 1] from 0 to T."""
    starts_document = np.zeros(len(loss_mask) + 1, dtype=np.bool_)
    starts_document[cu_seqlens] = True
    padded = np.concatenate([[False], loss_mask, [False]])
    begins = padded[1:-1] & (~padded[:-2] | starts_document[:-1])
    ends = padded[1:-1] & (~padded[2:] | starts_document[1:])
    first, last = np.flatnonzero(begins).astype(np.int64), np.flatnonzero(ends).astype(np.int64)
    if max_new_tokens is None:
        return Spans(first, last, np.zeros(len(first), dtype=np.bool_))
    limit = first + max_new_tokens - 1
    return Spans(first, np.minimum(last, limit), last > limit)


def samples_of_answers(pack: Pack) -> list[int]:
    """The store's sample of each answer of a pack, in the order of `walk_answers`."""
    cu_seqlens = pack.cu_seqlens.numpy()
    first = answer_spans(pack.loss_mask.numpy(), cu_seqlens).first
    return [pack.samples[document] for document in np.searchsorted(cu_seqlens, first, side="right") - 1]


@torch.no_grad()
def walk_answers(
    drafter: DFlashDrafter,
    features: Tensor,
    pack: Pack,
    *,
    embed: Callable[[Tensor], Tensor],
    lm_head: Tensor,
    max_new_tokens: int | None = None,
) -> list[Acceptance]:
    """Walks all answers of a pack at once, one block of each per round; one entry per answer, in pack order.

    A walk begins with the answer's first token as anchor. It drafts a block from context strictly before the anchor,
    accepts the longest prefix equal to the stored tokens, and goes on at the token behind it. An answer of one token
    has no step.

    Args:
        features: [T, F * H] in the drafter's scale and type.
        embed: token ids [...] -> the target's embeddings [..., H].
        lm_head: [V, H], the target's whole output head.
        max_new_tokens: most tokens of an answer that are walked; None: all.
    """
    device, size = features.device, drafter.config.block_size
    input_ids, cu_seqlens = pack.input_ids.to(device), pack.cu_seqlens.to(device)
    spans = answer_spans(pack.loss_mask.numpy(), pack.cu_seqlens.numpy(), max_new_tokens=max_new_tokens)
    answers = [Acceptance.of_block_size(size) for _ in spans.first]
    if not (spans.first < spans.last).any():
        return answers
    rows = drafter.keys_values(drafter.context(features), pack.positions.to(device))  # once for all rounds
    anchor = spans.first.copy()
    while len(walking := np.flatnonzero(anchor < spans.last)):
        anchors = torch.from_numpy(anchor[walking]).to(device)
        embeds = embed(block_tokens(anchors, input_ids, size, drafter.config.mask_token_id))
        hidden = drafter.blocks(embeds, rows, BlockLayout(anchors, cu_seqlens, size))
        left = spans.last[walking] - anchor[walking]
        num_drafts = np.minimum(size - 1, left - spans.cut[walking])
        drafted = (anchors[:, None] + torch.arange(1, size, device=device)).clamp(max=len(input_ids) - 1)
        accepted = _accepted(hidden[:, 1:], input_ids[drafted], torch.from_numpy(num_drafts).to(device), lm_head)
        num_accepted = accepted.cpu().numpy()
        num_gained = np.minimum(num_accepted + 1, left)
        anchor[walking] += num_gained
        # As in decoding, which does not know where an answer will end: only the step that ends it proposed less.
        asked = np.where(spans.cut[walking] | (num_gained == left), num_drafts, size - 1)
        counts = zip(walking.tolist(), asked.tolist(), num_accepted.tolist(), num_gained.tolist(), strict=True)
        for answer, drafts, right, gained in counts:
            answers[answer].count(num_drafts=drafts, num_accepted=right, num_gained=gained)
    return answers


def _accepted(hidden: Tensor, labels: Tensor, num_drafts: Tensor, lm_head: Tensor) -> Tensor:
    """Leading slots whose arg-max is the label: hidden [n, B - 1, H], labels [n, B - 1], num_drafts [n] -> int64 [n].

    Slot by slot, and only for blocks that were right so far: that costs one row of logits per token gained, instead
    of B - 1 per block.
    """
    accepted = torch.zeros_like(num_drafts)
    going = torch.arange(len(num_drafts), device=hidden.device)
    for slot in range(labels.shape[1]):
        going = going[num_drafts[going] > slot]
        if not len(going):
            break
        going = going[_choices(hidden[going, slot], lm_head) == labels[going, slot]]
        accepted[going] += 1
    return accepted


def _choices(hidden: Tensor, lm_head: Tensor) -> Tensor:
    """Arg-max tokens [n] for hidden [n, H]."""
    rows = max(1, _SLICE_ELEMENTS // lm_head.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.cat([(part.to(lm_head.dtype) @ lm_head.T).argmax(-1) for part in torch.split(hidden, rows)])
