"""Attention of draft blocks, against dense attention over the whole pack built cell by cell from the rules in words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from train.attention import BlockLayout, attend_cached, attend_per_document, attend_two_part
from train.flex import TILE, FlexMasks, flex_attend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def visible_cell_by_cell(anchors: list[int], cu_seqlens: list[int], block_size: int, window: int | None) -> np.ndarray:
    """Bool [A * B, T + A * B] from the sentences of the contract, one cell at a time."""
    num_rows, num_blocks = cu_seqlens[-1], len(anchors)
    document = [d for d in range(len(cu_seqlens) - 1) for _ in range(cu_seqlens[d + 1] - cu_seqlens[d])]
    cells = np.zeros((num_blocks * block_size, num_rows + num_blocks * block_size), dtype=bool)
    for i, anchor in enumerate(anchors):
        for slot in range(block_size):
            for row in range(num_rows):
                sees = document[row] == document[anchor] and row < anchor
                if window is not None and row < anchor + slot - (window - 1):
                    sees = False
                cells[i * block_size + slot, row] = sees
            for other in range(block_size):
                sees = window is None or other <= slot
                cells[i * block_size + slot, num_rows + i * block_size + other] = sees
    return cells


def dense_float64(inputs: Inputs, cells: np.ndarray) -> Tensor:
    query, context_key, context_value, block_key, block_value = (x.double() for x in inputs)
    groups = query.shape[2] // block_key.shape[2]
    keys = torch.cat([context_key, block_key.flatten(0, 1)]).repeat_interleave(groups, dim=1)
    values = torch.cat([context_value, block_value.flatten(0, 1)]).repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.flatten(0, 1), keys) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~torch.from_numpy(cells), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).view(query.shape)


def random_inputs(num_rows: int, num_blocks: int, block_size: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def heads(*shape: int) -> Tensor:
        return torch.randn(*shape, HEAD_DIM, generator=generator)

    query = heads(num_blocks, block_size, NUM_HEADS)
    context_key, context_value = heads(num_rows, NUM_KV_HEADS), heads(num_rows, NUM_KV_HEADS)
    block_shape = (num_blocks, block_size, NUM_KV_HEADS)
    return query, context_key, context_value, heads(*block_shape), heads(*block_shape)


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[int], list[int], int, int | None]:
    """Anchors (possibly a document's first row, possibly none in a document), boundaries, block size, window."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    cu_seqlens = [0, *np.cumsum(lengths).tolist()]
    anchors = draw(st.sets(st.integers(0, cu_seqlens[-1] - 1), min_size=1, max_size=8))
    block_size = draw(st.integers(2, 6))
    window = draw(st.none() | st.integers(block_size, 20))
    return sorted(anchors), cu_seqlens, block_size, window


@given(packs())
@settings(max_examples=40, deadline=None)
def test_both_cpu_forms_equal_dense_attention_over_the_whole_pack(
    pack: tuple[list[int], list[int], int, int | None],
) -> None:
    anchors, cu_seqlens, block_size, window = pack
    inputs = random_inputs(cu_seqlens[-1], len(anchors), block_size, seed=len(anchors))
    expected = dense_float64(inputs, visible_cell_by_cell(anchors, cu_seqlens, block_size, window))
    layout = BlockLayout(torch.tensor(anchors), torch.tensor(cu_seqlens), block_size)
    for form in (attend_per_document, attend_two_part):
        output = form(*inputs, layout, window)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_gradients_of_both_cpu_forms_equal_those_of_dense_attention(window: int | None) -> None:
    anchors, cu_seqlens, block_size = [0, 3, 11, 12, 29], [0, 5, 17, 30], 4
    inputs = random_inputs(30, 5, block_size, seed=1)
    cells = visible_cell_by_cell(anchors, cu_seqlens, block_size, window)
    layout = BlockLayout(torch.tensor(anchors), torch.tensor(cu_seqlens), block_size)
    probe = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2))

    def gradients(output_of: Callable[[Inputs], Tensor]) -> tuple[Tensor, ...]:
        query, context_key, context_value, block_key, block_value = (x.clone().requires_grad_() for x in inputs)
        leaves = (query, context_key, context_value, block_key, block_value)
        return torch.autograd.grad((output_of(leaves) * probe).sum(), leaves)

    expected = gradients(lambda leaves: dense_float64(leaves, cells))
    for form in (attend_per_document, attend_two_part):
        found = gradients(lambda leaves, form=form: form(*leaves, layout, window))  # type: ignore[misc]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def long_pack(block_size: int) -> tuple[Tensor, Tensor]:
    """Anchors and boundaries over several tiles, with a document without anchors and tiles without neighbours."""
    cu_seqlens = torch.tensor([0, 300, 310, 620, 900])
    generator = torch.Generator().manual_seed(block_size)
    first = torch.randperm(300, generator=generator)[:25]
    third = 310 + torch.randperm(310, generator=generator)[:12]
    last = torch.tensor([620, 880, 899])
    return torch.cat([first, third, last]).sort().values, cu_seqlens


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("block_size", [8, 6])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_specification_across_tiles(block_size: int, window: int | None) -> None:
    anchors, cu_seqlens = long_pack(block_size)
    inputs = random_inputs(900, len(anchors), block_size, seed=3)
    layout = BlockLayout(anchors, cu_seqlens, block_size)
    expected = attend_per_document(*inputs, layout, window)
    output = flex_attend(*inputs, layout.flex_masks(), window)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def in_tiles(cells: np.ndarray) -> np.ndarray:
    return cells.reshape(cells.shape[0] // TILE, TILE, -1, TILE).swapaxes(1, 2)


def listed(counts: Tensor, indices: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """The tiles that a block mask lists, as bool [query tiles, key tiles]."""
    tiles = np.zeros(shape, dtype=bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        tiles[row, indices[0, 0, row, :count].numpy()] = True
    return tiles


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("block_size", [8, 6, 16])
def test_tiles_are_skipped_only_when_empty_and_unmasked_only_when_full(block_size: int, window: int | None) -> None:
    anchors, cu_seqlens = long_pack(block_size)
    masks = FlexMasks(anchors, BlockLayout(anchors, cu_seqlens, block_size).starts, 900, block_size)
    cells = visible_cell_by_cell(anchors.tolist(), cu_seqlens.tolist(), block_size, window)
    context = np.pad(cells[:, :900], ((0, 0), (0, masks.padded_rows - 900)))
    cells = np.concatenate([context, cells[:, 900:]], axis=1)
    cells = np.pad(cells, [(0, 0), (0, -cells.shape[1] % TILE)])
    spare = -cells.shape[0] % TILE
    some = in_tiles(np.pad(cells, [(0, spare), (0, 0)])).any((2, 3))
    whole = in_tiles(np.pad(cells, [(0, spare), (0, 0)], constant_values=True)).all((2, 3))

    block_mask = masks.get(window)
    partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices, some.shape)
    assert block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None
    full = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, some.shape)
    assert not (some & ~(partial | full)).any(), "a visible cell lies in a skipped tile"
    assert not (full & ~whole).any(), "a tile counted as full has a hidden cell"
    assert not (partial & full).any()
    if window is None and block_size == 8:
        assert not (partial & ~some).any(), "a tile is computed for nothing"


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("block_size", [8, 6])
def test_the_tile_mask_answers_for_whole_tiles_also_past_the_last_block(block_size: int, window: int | None) -> None:
    anchors, cu_seqlens = long_pack(block_size)
    masks = FlexMasks(anchors, BlockLayout(anchors, cu_seqlens, block_size).starts, 900, block_size)
    num_queries = len(anchors) * block_size
    queries = torch.arange(-(-num_queries // TILE) * TILE)[:, None]
    assert len(queries) > num_queries
    zero = torch.tensor(0)
    seen = masks._mask_mod(window)(zero, zero, queries, torch.arange(masks.padded_rows + len(queries)))[:num_queries]
    cells = torch.from_numpy(visible_cell_by_cell(anchors.tolist(), cu_seqlens.tolist(), block_size, window))
    context, own = cells.split([900, num_queries], dim=1)  # type: ignore[no-untyped-call]  # torch has no types here
    assert torch.equal(seen[:, :900], context) and not seen[:, 900 : masks.padded_rows].any()
    assert torch.equal(seen[:, masks.padded_rows :][:, :num_queries], own)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_decoding_form_equals_the_block_at_the_end_of_one_document(num_rows: int, window: int | None) -> None:
    inputs = random_inputs(num_rows + 1, 1, 5, seed=num_rows)
    query, context_key, context_value, block_key, block_value = inputs
    layout = BlockLayout(torch.tensor([num_rows]), torch.tensor([0, num_rows + 1]), 5)
    expected = attend_per_document(*inputs, layout, window)[0]
    rows = slice(0, num_rows)
    output = attend_cached(query[0], context_key[rows], context_value[rows], block_key[0], block_value[0], window)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_positions_restart_in_each_document_and_slots_continue_from_their_anchor() -> None:
    layout = BlockLayout(torch.tensor([1, 4]), torch.tensor([0, 3, 6]), 3)
    assert layout.context_positions().tolist() == [0, 1, 2, 0, 1, 2]
    assert layout.block_positions.tolist() == [[1, 2, 3], [1, 2, 3]]
