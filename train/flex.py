"""FlexAttention over a pack of blocks: tile masks computed from intervals, never from a dense mask.

Letters as in `train.attention`; R = query rows = A * B, M = a tile's rows (`TILE`). Keys are laid out as
[context rows, padded to a whole tile; block rows], so that a tile never mixes the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexMasks:
    """The tile masks of one pack, kept per window so that all layers of a kind share one.

    anchors and starts [A]: pack row of each anchor, and first row of its document. num_rows = T.
    """

    def __init__(self, anchors: Tensor, starts: Tensor, num_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_rows = num_rows
        self.padded_rows = _tiles(num_rows) * TILE
        self._anchors, self._starts = anchors, starts
        self._masks: dict[int | None, BlockMask] = {}

    def get(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            self._masks[window] = self._build(window)
        return self._masks[window]

    def _build(self, window: int | None) -> BlockMask:
        num_queries = self._anchors.shape[0] * self.block_size
        some, whole = self._tiles_seen(window)
        partial_count, partial_index = _ordered(some & ~whole)
        full_count, full_index = _ordered(whole)
        return BlockMask.from_kv_blocks(
            partial_count,
            partial_index,
            full_count,
            full_index,
            BLOCK_SIZE=TILE,
            mask_mod=self._mask_mod(window),
            seq_lengths=(num_queries, self.padded_rows + num_queries),
        )

    def _tiles_seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Bool [query tiles, key tiles] twice: some pair may be visible, every pair surely is."""
        device = self._anchors.device
        num_blocks, size = self._anchors.shape[0], self.block_size
        query_first = torch.arange(_tiles(num_blocks * size), device=device) * TILE
        first_block = query_first // size
        last_block = ((query_first + TILE - 1) // size).clamp(max=num_blocks - 1)
        # First visible row for the first and for the last slot of each block.
        low_first, low_last = self._starts, self._starts
        if window is not None:
            low_first = torch.maximum(low_first, self._anchors - (window - 1))
            low_last = torch.maximum(low_last, self._anchors + size - 1 - (window - 1))
        anchors = self._anchors[:, None]
        key_first = torch.arange(0, self.padded_rows, TILE, device=device)
        some = (low_first[:, None] < key_first + TILE) & (key_first < anchors)  # [A, context tiles]
        whole = (low_last[:, None] <= key_first) & (key_first + TILE <= anchors)
        covered = (last_block - first_block + 1)[:, None]
        tile_some = _count_between(some, first_block, last_block) > 0
        tile_whole = _count_between(whole, first_block, last_block) == covered
        own = (first_block[:, None] <= last_block) & (first_block <= last_block[:, None])
        return torch.cat([tile_some, own], dim=1), torch.cat([tile_whole, torch.zeros_like(own)], dim=1)

    def _mask_mod(self, window: int | None) -> MaskMod:
        size, padded_rows = self.block_size, self.padded_rows
        # The last query tile may reach past the last block, and kernels evaluate the mask there too.
        spare = (_tiles(self._anchors.shape[0] * size) * TILE - 1) // size + 1 - self._anchors.shape[0]
        anchors, starts = F.pad(self._anchors, (0, spare)), F.pad(self._starts, (0, spare))

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block, slot = query // size, query % size
            anchor = anchors[block]
            in_context = (key >= starts[block]) & (key < anchor)
            own_row = key - padded_rows
            in_block = (own_row >= 0) & (own_row // size == block)
            if window is not None:
                in_context = in_context & (key >= anchor + slot - (window - 1))
                in_block = in_block & (own_row % size <= slot)
            return in_context | in_block

        return visible


def flex_attend(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    masks: FlexMasks,
    window: int | None,
) -> Tensor:
    """`attend` of train.attention by FlexAttention: compiled on CUDA, plain and forward-only elsewhere."""
    padding = (0, 0, 0, 0, 0, masks.padded_rows - masks.num_rows)
    keys = torch.cat([F.pad(context_key, padding), block_key.flatten(0, 1)])  # [padded T + R, G, D]
    values = torch.cat([F.pad(context_value, padding), block_value.flatten(0, 1)])
    attention = _compiled() if query.device.type == "cuda" else _plain
    output = attention(
        query.flatten(0, 1).transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        block_mask=masks.get(window),
        enable_gqa=query.shape[-2] != keys.shape[-2],
    )
    assert isinstance(output, Tensor)
    return output[0].transpose(0, 1).reshape(query.shape)


def _plain(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, enable_gqa: bool) -> object:
    return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=enable_gqa)


@cache
def _compiled() -> Callable[..., object]:
    compiled: Callable[..., object] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _tiles(rows: int) -> int:
    return -(-rows // TILE)


def _count_between(seen: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """How many of rows first..last (inclusive) of bool [A, tiles] are set, per tile: [len(first), tiles]."""
    sums = F.pad(seen.cumsum(dim=0), (0, 0, 1, 0))
    counts: Tensor = sums[last + 1] - sums[first]
    return counts


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, query tiles] and indices [1, 1, query tiles, key tiles] with the set tiles first."""
    index = torch.argsort(tiles.to(torch.int8), dim=1, descending=True, stable=True)
    return tiles.sum(dim=1, dtype=torch.int32)[None, None], index.to(torch.int32)[None, None]
