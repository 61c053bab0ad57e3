"""The cost of a step that is announced at the start, against what torch counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_train_drafter import BLOCK_SIZE, FULL, HIDDEN, NUM_TAPS, SLIDING, WINDOW, tiny_config
from test_train_loop import run
from test_train_loop import settings as run_settings
from torch.utils.flop_counter import FlopCounterMode

from cache_tools.reader import Store
from cache_tools.synthetic import make_store
from train.attention import BlockLayout
from train.cost import StepShape, step_flops, with_unit
from train.drafter import DFlashDrafter
from train.objective import OutputHead, block_loss

VOCAB = 50


@pytest.mark.parametrize("stack", [(FULL,), (FULL, FULL, FULL)])
def test_flops_equal_those_that_torch_counts_in_a_step(stack: tuple[str, ...]) -> None:
    # One anchor a document, so that no row is scored that the block does not see.
    anchors, cu_seqlens = torch.tensor([9, 20]), torch.tensor([0, 12, 30])
    drafter = DFlashDrafter(tiny_config(*stack))
    features, embeds = torch.randn(30, NUM_TAPS * HIDDEN), torch.randn(2, BLOCK_SIZE, HIDDEN)
    weights = torch.ones(2, BLOCK_SIZE)
    weights[:, 0] = 0
    labels = torch.zeros(2, BLOCK_SIZE, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        layout = BlockLayout(anchors, cu_seqlens, BLOCK_SIZE)
        hidden = drafter(embeds, drafter.context(features), layout)
        torch.autograd.backward(block_loss(hidden, labels, weights, OutputHead(torch.randn(VOCAB, HIDDEN))).loss)
    shape = StepShape(
        context_tokens=30,
        num_blocks=2,
        slots_with_loss=2 * (BLOCK_SIZE - 1),
        visible_rows=(9 + 8) / 2,
        head_rows=VOCAB,
    )
    assert step_flops(drafter.config, shape) == counter.get_total_flops()


def test_a_window_limits_the_rows_that_are_counted() -> None:
    def flops(stack: tuple[str, ...], visible_rows: float) -> float:
        return step_flops(
            tiny_config(*stack),
            StepShape(context_tokens=0, num_blocks=1, slots_with_loss=0, visible_rows=visible_rows, head_rows=VOCAB),
        )

    assert flops((SLIDING,), 1000) == flops((FULL,), WINDOW) < flops((FULL,), 1000)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1.234e9, "1.23 GB"), (5e18, "5e+03 PB")]
)
def test_units(value: float, text: str) -> None:
    assert with_unit(value, "B") == text


def test_training_announces_parameters_flops_and_bytes(tmp_path: Path) -> None:
    make_store(tmp_path / "s.zarr", [16] * 4)
    lines = run(run_settings(tmp_path / "s.zarr", tmp_path / "run", steps=1))
    assert " M parameters" in lines[0]
    assert lines[1].startswith("a step: at most ") and " MFLOP in matrix products, " in lines[1]
    store = Store.open(tmp_path / "s.zarr")
    num_bytes = 96 * 2 * len(store.layer_ids) * store.hidden_size * 2  # two packs of 96 tokens, two bytes a value
    assert lines[1].endswith(f", {with_unit(num_bytes, 'B')} of hidden states")
