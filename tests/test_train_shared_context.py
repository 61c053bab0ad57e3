"""Blocks in slices over a shared context: the same loss and gradients as all at once, and memory that does not grow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train_attention import long_pack, random_inputs
from test_train_drafter import BLOCK_SIZE, CU_SEQLENS, FULL, HIDDEN, NUM_TAPS, SLIDING, tiny_drafter
from test_train_loop import losses, run
from test_train_loop import settings as run_settings
from torch import Tensor

from cache_tools.synthetic import make_store
from train import shared_context
from train.attention import BlockLayout
from train.drafter import DFlashDrafter
from train.flex import flex_attend
from train.objective import BlockSums, OutputHead, block_loss
from train.shared_context import SharedContext, block_slices, blocks_per_slice


@given(st.integers(1, 300), st.integers(1, 40))
def test_slices_cover_all_blocks_in_order_and_differ_by_one_at_most(num_blocks: int, largest: int) -> None:
    slices = list(block_slices(num_blocks, largest))
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(num_blocks))
    sizes = [s.stop - s.start for s in slices]
    assert max(sizes) <= largest and max(sizes) - min(sizes) <= 1
    assert len(slices) == -(-num_blocks // largest)


def test_a_slice_holds_at_least_one_block() -> None:
    assert blocks_per_slice(1 << 20, torch.device("cpu")) == 1


def whole(drafter: DFlashDrafter, features: Tensor, embeds: Tensor, anchors: Tensor, targets: dict[str, Any]) -> Tensor:
    """Ordinary autograd over all blocks at once; returns the loss."""
    hidden = drafter(embeds, drafter.context(features), BlockLayout(anchors, CU_SEQLENS, BLOCK_SIZE))
    loss = block_loss(hidden, **targets).loss
    torch.autograd.backward(loss)
    return loss.detach()


def sliced(
    drafter: DFlashDrafter, features: Tensor, embeds: Tensor, anchors: Tensor, targets: dict[str, Any], largest: int
) -> Tensor:
    layout = BlockLayout(anchors, CU_SEQLENS, BLOCK_SIZE)
    context = SharedContext(drafter.keys_values(drafter.context(features), layout.context_positions()))
    sums = BlockSums.zero(BLOCK_SIZE)
    for blocks in block_slices(len(anchors), largest):
        part = BlockLayout(anchors[blocks], CU_SEQLENS, BLOCK_SIZE)
        hidden = drafter.blocks(embeds[blocks], context.rows, part)
        output = block_loss(hidden, targets["labels"][blocks], targets["weights"][blocks], targets["head"])
        torch.autograd.backward(output.loss)
        sums += output.sums
    context.backward()
    return sums.loss


@given(st.sets(st.integers(0, int(CU_SEQLENS[-1]) - 1), min_size=1, max_size=12), st.integers(1, 12), st.booleans())
@settings(max_examples=30, deadline=None)
def test_loss_and_gradients_do_not_depend_on_the_size_of_the_slices(rows: set[int], largest: int, slides: bool) -> None:
    random = torch.Generator().manual_seed(len(rows))
    anchors = torch.tensor(sorted(rows))
    features = torch.randn(int(CU_SEQLENS[-1]), NUM_TAPS * HIDDEN, generator=random)
    embeds = torch.randn(len(anchors), BLOCK_SIZE, HIDDEN, generator=random)
    targets = {
        "labels": torch.randint(50, (len(anchors), BLOCK_SIZE), generator=random),
        "weights": torch.rand(len(anchors), BLOCK_SIZE, generator=random),
        "head": OutputHead(torch.randn(50, HIDDEN, generator=random)),
    }
    one, other = (tiny_drafter(SLIDING if slides else FULL, FULL) for _ in range(2))
    expected = whole(one, features, embeds, anchors, targets)
    found = sliced(other, features, embeds, anchors, targets, largest)
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-4 * float(a.grad.abs().max()) + 1e-7, msg=name)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("largest", [1, 7, 16])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_of_slices_equals_that_of_all_blocks(largest: int, window: int | None) -> None:
    anchors, cu_seqlens = long_pack(8)
    query, key, value, own_key, own_value = random_inputs(900, len(anchors), 8, seed=3)
    expected = flex_attend(
        query, key, value, own_key, own_value, BlockLayout(anchors, cu_seqlens, 8).flex_masks(), window
    )
    parts = [
        flex_attend(
            *(query[blocks], key, value, own_key[blocks], own_value[blocks]),
            BlockLayout(anchors[blocks], cu_seqlens, 8).flex_masks(),
            window,
        )
        for blocks in block_slices(len(anchors), largest)
    ]
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-5)


def test_training_in_slices_follows_the_curve_of_training_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(tmp_path / "s.zarr", [16, 30, 9, 25] * 3)
    config = run_settings(tmp_path / "s.zarr", tmp_path / "whole", steps=6)
    run(config)
    monkeypatch.setattr(shared_context, "_SLICE_SLOTS", {"cpu": 3 * config.block_size})
    run(replace(config, out=tmp_path / "sliced"))
    for a, b in zip(losses(tmp_path / "whole"), losses(tmp_path / "sliced"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_peak_memory_does_not_grow_with_the_number_of_blocks() -> None:
    """Bytes of what autograd keeps for one slice: the most that is alive at a time, whatever the number of slices."""
    kept: list[int] = []
    for num_blocks in (8, 24):
        drafter = tiny_drafter(FULL, FULL)
        anchors = torch.arange(1, num_blocks + 1)
        features = torch.randn(int(CU_SEQLENS[-1]), NUM_TAPS * HIDDEN)
        embeds = torch.randn(num_blocks, BLOCK_SIZE, HIDDEN)
        context = SharedContext(
            drafter.keys_values(drafter.context(features), BlockLayout(anchors, CU_SEQLENS, 4).context_positions())
        )
        largest = 0
        for blocks in block_slices(num_blocks, 8):
            saved = 0

            def count(tensor: Tensor) -> Tensor:
                nonlocal saved
                saved += tensor.nbytes if tensor.ndim > 2 else 0
                return tensor

            layout = BlockLayout(anchors[blocks], CU_SEQLENS, BLOCK_SIZE)
            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                hidden = drafter.blocks(embeds[blocks], context.rows, layout)
            torch.autograd.backward(hidden.sum())
            largest = max(largest, saved)
        kept.append(largest)
    assert 0 < kept[1] <= 1.2 * kept[0]  # later blocks see more rows of their document
