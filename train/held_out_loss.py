"""The loss of a drafter on a pack that it was not trained on: always the same blocks, whatever run is judged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from train.anchors import block_targets, block_tokens, decay_weights, sample_anchors
from train.attention import BlockLayout
from train.batches import Pack
from train.drafter import DFlashDrafter
from train.objective import BlockSums, OutputHead, block_loss

# Not a run's seed: runs that differ by their seed are to be judged by the same blocks.
_ANCHOR_SEED = 0


def held_out_sums(
    drafter: DFlashDrafter,
    features: Tensor,
    pack: Pack,
    *,
    embed: Callable[[Tensor], Tensor],
    head: OutputHead,
    anchors_per_supervised: float,
    gamma: float,
) -> BlockSums:
    """Cross entropy with decaying slot weights, and accuracy, over blocks of a pack.

    Args:
        features: [T, F * H] of the pack as the drafter expects them, on the device where everything runs.
        embed: token ids [...] -> embeddings [..., H].
        anchors_per_supervised: blocks for each supervised token.
        gamma: decay constant of the slot weights.
    """
    config, device = drafter.config, features.device
    chosen = sample_anchors(
        pack.loss_mask.numpy(),
        pack.cu_seqlens.numpy(),
        pack.samples,
        seed=_ANCHOR_SEED,
        step=0,
        anchors_per_supervised=anchors_per_supervised,
    )
    if not len(chosen):
        return BlockSums.zero(config.block_size, device)
    anchors, cu_seqlens, input_ids, loss_mask = (
        tensor.to(device) for tensor in (torch.from_numpy(chosen), pack.cu_seqlens, pack.input_ids, pack.loss_mask)
    )
    targets = block_targets(anchors, input_ids, loss_mask, cu_seqlens, config.block_size)
    embeds = embed(block_tokens(anchors, input_ids, config.block_size, config.mask_token_id))
    layout = BlockLayout(anchors, cu_seqlens, config.block_size)
    hidden = drafter(embeds, drafter.context(features), layout)
    return block_loss(hidden, targets.labels, decay_weights(targets.valid, gamma), head).sums
