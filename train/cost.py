"""What one optimizer step costs, before any is done.

Letters: T = context tokens of a step, A = blocks, B = block size, R = slots with loss, C = context rows that a block
sees, H = hidden size, F = tapped layers, Q and K = widths of all query and of all key heads, I = width of the MLP, n =
draft layers, V = tokens of the output head.

Multiply-adds of the forward pass, each two floating-point operations:

    context     T (F H H + n 2 H K)                 fc, and keys and values of every layer
    blocks      A B n (2 H Q + 2 H K + 3 H I)       query, output, key and value projections, MLP
    attention   A B n 2 Q (C + B)                   scores and mixing, over the context and the own block
    head        R H V

The backward pass does every product twice (for its input and for its weight), but `fc` once, whose input is data, and
the head once, whose weight is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_tools.reader import Store
from train.config import TrainConfig
from train.drafter_config import DrafterConfig
from train.tapped import bytes_per_token


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """How much a step trains on, over all ranks together."""

    context_tokens: int
    num_blocks: int
    slots_with_loss: int
    visible_rows: float
    """Context rows that a block attends to on a layer without a window, on average."""
    head_rows: int
    """Tokens of the output head."""


def step_flops(config: DrafterConfig, shape: StepShape) -> float:
    """Floating-point operations of all matrix products of a step, forward and backward."""
    width, slots = config.hidden_size, shape.num_blocks * config.block_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layers = config.num_hidden_layers
    fc = shape.context_tokens * len(config.target_layer_ids) * width * width
    context = shape.context_tokens * layers * 2 * width * keys
    blocks = slots * layers * (2 * width * queries + 2 * width * keys + 3 * width * config.intermediate_size)
    scored = sum(_rows_seen(config, layer, shape.visible_rows) + config.block_size for layer in range(layers))
    attention = slots * 2 * queries * scored
    head = shape.slots_with_loss * width * shape.head_rows
    return 2.0 * (2 * fc + 3 * (context + blocks + attention) + 2 * head)


def describe_step(
    config: TrainConfig, shape: DrafterConfig, store: Store, lengths: NDArray[np.int64], *, head_rows: int
) -> str:
    """The cost of a full step over samples of these lengths; a block at a random token sees half of its sample."""
    step = StepShape(
        context_tokens=config.token_budget * config.packs_per_step,
        num_blocks=config.anchors_per_step,
        slots_with_loss=config.anchors_per_step * (config.block_size - 1),
        visible_rows=float(np.square(lengths, dtype=np.float64).sum() / lengths.sum()) / 2,
        head_rows=head_rows,
    )
    row_bytes = bytes_per_token(store.manifest.codec, len(shape.target_layer_ids), shape.hidden_size)
    return (
        f"a step: at most {with_unit(step_flops(shape, step), 'FLOP')} in matrix products, "
        f"{with_unit(step.context_tokens * row_bytes, 'B')} of hidden states"
    )


def _rows_seen(config: DrafterConfig, layer: int, visible_rows: float) -> float:
    window = config.window(layer)
    return visible_rows if window is None else min(visible_rows, window)


def with_unit(value: float, unit: str) -> str:
    """For example 1.73 TFLOP."""
    for prefix in ("", "K", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"
