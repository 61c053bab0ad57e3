"""Which positions open a block in a step, and what each block is to predict.

Anchors are drawn by keyed hashes of (seed, step, sample, position), so that what a step trains on depends
neither on the pack a sample sits in nor on the number of GPUs, and a resumed run repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.order import mix64, mix64_array

# Separate the two uses of a (seed, step, sample) key from each other and from those of other modules.
_COUNT_KEY = 0x616E63686F72 << 8
_CHOICE_KEY = _COUNT_KEY + 1

# The paper's a: with 0 a wrong slot would end all learning of the slots after it, with 1 all weights are fixed.
DPACE_SMOOTHING = 0.5


def candidates(loss_mask: NDArray[np.bool_], cu_seqlens: NDArray[np.integer]) -> NDArray[np.int64]:
    """Ascending pack rows that may open a block: it and the next row are supervised, in one document.

    The last row of a document never qualifies; a block may run past its document's end (those slots get no
    loss).
    """
    follows = loss_mask[:-1] & loss_mask[1:]
    boundaries = cu_seqlens[1:-1].astype(np.int64)
    follows[boundaries - 1] = False
    return np.flatnonzero(follows).astype(np.int64)


def sample_anchors(
    loss_mask: NDArray[np.bool_],
    cu_seqlens: NDArray[np.integer],
    samples: Sequence[int],
    *,
    seed: int,
    step: int,
    anchors_per_supervised: float,
) -> NDArray[np.int64]:
    """The anchors of one pack in one step: ascending pack rows [A].

    loss_mask [T]; cu_seqlens [D + 1]; `samples` are the D documents' sample numbers. A sample with s
    supervised tokens gets `anchors_per_supervised * s` anchors on average (rounded up or down by a keyed
    coin), at most its candidates; which ones is a keyed choice.
    """
    rows = candidates(loss_mask, cu_seqlens)
    starts = cu_seqlens[:-1].astype(np.int64)
    document = np.searchsorted(starts, rows, side="right") - 1
    samples_array = np.asarray(samples, dtype=np.int64)
    ranks_key = mix64_array(mix64(seed, _CHOICE_KEY, step), samples_array[document], rows - starts[document])
    supervised = np.add.reduceat(loss_mask.astype(np.int64), starts)
    quota = _quota(supervised, samples_array, seed=seed, step=step, rate=anchors_per_supervised)
    order = np.lexsort((ranks_key, document))
    first_of_document = np.searchsorted(document, np.arange(len(samples)))
    rank = np.arange(len(rows)) - first_of_document[document]  # `document` is ascending, so sorted alike
    chosen = order[rank < quota[document]]
    return np.sort(rows[chosen])


def _quota(
    supervised: NDArray[np.int64], samples: NDArray[np.int64], *, seed: int, step: int, rate: float
) -> NDArray[np.int64]:
    """floor(rate * supervised + u) per sample, u a keyed uniform number in [0, 1)."""
    uniform = (mix64_array(mix64(seed, _COUNT_KEY, step), samples) >> np.uint64(11)) * 2.0**-53
    return np.floor(rate * supervised + uniform).astype(np.int64)


@dataclass(frozen=True)
class BlockTargets:
    """What the slots of each block should say. Slot k belongs to pack row anchor + k."""

    labels: Tensor
    """int64 [A, B]; token ids, 0 where the slot lies past the document's end."""
    valid: Tensor
    """bool [A, B]; slots that carry loss: k >= 1, inside the document, and supervised."""


def block_targets(
    anchors: Tensor, input_ids: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, block_size: int
) -> BlockTargets:
    """Labels of the blocks at `anchors` [A] of a pack: input_ids and loss_mask [T], cu_seqlens [D + 1]."""
    boundaries = cu_seqlens.to(device=anchors.device, dtype=torch.int64)
    ends = boundaries[torch.searchsorted(boundaries, anchors, right=True)]
    slots = torch.arange(block_size, device=anchors.device)
    rows = anchors[:, None] + slots
    inside = rows < ends[:, None]
    rows = rows.clamp(max=input_ids.shape[0] - 1)
    labels = torch.where(inside, input_ids[rows], 0)
    return BlockTargets(labels=labels, valid=inside & loss_mask[rows] & (slots > 0))


def decay_weights(valid: Tensor, gamma: float) -> Tensor:
    """Float32 [A, B]: exp(-(k - 1) / gamma) at valid slots (early slots decide acceptance), 0 elsewhere."""
    slots = torch.arange(valid.shape[1], device=valid.device, dtype=torch.float32)
    return torch.exp(-(slots - 1) / gamma) * valid


def slot_weights(valid: Tensor, kind: Literal["uniform", "decay", "dpace"], gamma: float) -> Tensor:
    """What is known of the slots' weights before the drafter has run: float32 [A, B], 0 where `valid` is false.

    "decay" is `decay_weights`; the others are 1 at valid slots, which `streak_weights` multiplies for "dpace".
    """
    return decay_weights(valid, gamma) if kind == "decay" else valid.float()


def streak_weights(label_probability: Tensor, valid: Tensor) -> Tensor:
    """D-PACE (arXiv 2605.18810): how much of the expected acceptance length hangs on each slot; float32 [A, B].

    With q the drafter's probability of the label and a = 0.5: smoothed q'_j = (1 - a) q_j + a, chance to come as
    far as slot j C_j = q'_1 ... q'_j, weight w_j = C_j + C_{j+1} + ... of the slots from j on. Slots that are not
    valid change nothing: their q' is 1, their C is left out of the sums, their weight is 0. No gradient flows.
    """
    smoothed = (1 - DPACE_SMOOTHING) * label_probability.detach().float() + DPACE_SMOOTHING
    reached = torch.where(valid, smoothed, 1.0).cumprod(dim=1) * valid
    return reached.flip(1).cumsum(dim=1).flip(1) * valid


def block_tokens(anchors: Tensor, input_ids: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Input tokens of the blocks, int64 [A, B]: the anchor's own token, then mask tokens."""
    tokens = input_ids.new_full((anchors.shape[0], block_size), mask_token_id)
    tokens[:, 0] = input_ids[anchors]
    return tokens
