"""The drafter: its shape, what a slot can see, and that decoding computes what training computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_tools.errors import ConfigError
from train.attention import BlockLayout
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig

FULL, SLIDING = "full_attention", "sliding_attention"
BLOCK_SIZE, HIDDEN, NUM_TAPS, WINDOW = 4, 24, 2, 6
CU_SEQLENS = torch.tensor([0, 12, 30])
ANCHORS = torch.tensor([3, 9, 12, 20, 27])
STACKS = [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)]


def tiny_config(*layer_types: str, **changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "block_size": BLOCK_SIZE,
        "mask_token_id": 49,
        "target_layer_ids": (1, 2),
        "num_target_layers": 5,
        "rope_theta": 10000.0,
        "layer_types": layer_types,
        "sliding_window": WINDOW if SLIDING in layer_types else None,
    }
    return DrafterConfig(**{**values, **changes})


def tiny_drafter(*layer_types: str) -> DFlashDrafter:
    """With weights large enough that every visible row matters."""
    drafter = DFlashDrafter(tiny_config(*layer_types), seed=3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.mul_(15)
    return drafter


def inputs() -> tuple[Tensor, Tensor]:
    """Features [T, F * H] and block embeddings [A, B, H]."""
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(int(CU_SEQLENS[-1]), NUM_TAPS * HIDDEN, generator=generator)
    return features, torch.randn(len(ANCHORS), BLOCK_SIZE, HIDDEN, generator=generator)


@torch.no_grad()
def run(drafter: DFlashDrafter, features: Tensor, block_embeds: Tensor) -> Tensor:
    layout = BlockLayout(ANCHORS, CU_SEQLENS, BLOCK_SIZE)
    hidden: Tensor = drafter(block_embeds, drafter.context(features), layout)
    return hidden


def changed(before: Tensor, after: Tensor) -> Tensor:
    """Bool [A, B]: which slots came out differently at all."""
    return (before != after).any(-1)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("row", range(int(CU_SEQLENS[-1])))
def test_a_context_row_reaches_exactly_the_blocks_after_it_in_its_document(stack: tuple[str, ...], row: int) -> None:
    drafter, (features, block_embeds) = tiny_drafter(*stack), inputs()
    before = run(drafter, features, block_embeds)
    features[row] += 1
    seen = changed(before, run(drafter, features, block_embeds))
    documents = torch.searchsorted(CU_SEQLENS, ANCHORS, right=True) - 1
    row_document = int(torch.searchsorted(CU_SEQLENS, row, right=True)) - 1
    in_reach = ((documents == row_document) & (row < ANCHORS))[:, None].expand(-1, BLOCK_SIZE)
    if FULL not in stack:
        # Two causal sliding layers: a slot hears of rows through earlier slots too, whose window begins earlier.
        in_reach = in_reach & (row >= ANCHORS - (WINDOW - 1))[:, None]
    assert torch.equal(seen, in_reach)


def test_a_sliding_layer_sees_one_row_less_for_each_further_slot() -> None:
    drafter, (features, block_embeds) = tiny_drafter(SLIDING), inputs()
    before = run(drafter, features, block_embeds)
    for row in range(int(CU_SEQLENS[0]), int(CU_SEQLENS[1])):
        altered = features.clone()
        altered[row] += 1
        seen = changed(before, run(drafter, altered, block_embeds))
        for block, anchor in enumerate(ANCHORS[:2].tolist()):
            expected = [row < anchor and row >= anchor + k - (WINDOW - 1) for k in range(BLOCK_SIZE)]
            assert seen[block].tolist() == expected, (row, anchor)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("slot", range(BLOCK_SIZE))
def test_a_slot_reaches_its_own_block_only_and_backwards_only_through_full_layers(
    stack: tuple[str, ...], slot: int
) -> None:
    drafter, (features, block_embeds) = tiny_drafter(*stack), inputs()
    before = run(drafter, features, block_embeds)
    block_embeds[1, slot] += 1
    seen = changed(before, run(drafter, features, block_embeds))
    expected = torch.zeros_like(seen)
    expected[1] = True if FULL in stack else torch.arange(BLOCK_SIZE) >= slot
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("pieces", [[1], [4, 3], [2, 1, 1, 9, 3], [40]])
def test_decoding_with_a_cache_computes_what_training_computed(stack: tuple[str, ...], pieces: list[int]) -> None:
    """After every piece of context, shorter and longer than the window, the next block equals the trained one."""
    drafter = tiny_drafter(*stack)
    total = sum(pieces)
    generator = torch.Generator().manual_seed(total)
    features = torch.randn(total + 1, NUM_TAPS * HIDDEN, generator=generator)
    anchors = torch.tensor(pieces).cumsum(0)
    block_embeds = torch.randn(len(pieces), BLOCK_SIZE, HIDDEN, generator=generator)
    layout = BlockLayout(anchors, torch.tensor([0, total + 1]), BLOCK_SIZE)
    cache = drafter.new_cache()
    with torch.no_grad():
        trained = drafter(block_embeds, drafter.context(features), layout)
        for block, piece in enumerate(pieces):
            drafter.extend(cache, features[cache.length : cache.length + piece])
            decoded = drafter.draft_block(block_embeds[block], cache)
            torch.testing.assert_close(decoded, trained[block], rtol=1e-5, atol=1e-5)


def test_parameters_have_the_published_names_and_shapes() -> None:
    shapes = {name: tuple(p.shape) for name, p in DFlashDrafter(tiny_config(FULL)).named_parameters()}
    assert shapes == {
        "fc.weight": (24, 48),
        "hidden_norm.weight": (24,),
        "norm.weight": (24,),
        "layers.0.input_layernorm.weight": (24,),
        "layers.0.post_attention_layernorm.weight": (24,),
        "layers.0.self_attn.q_proj.weight": (32, 24),
        "layers.0.self_attn.k_proj.weight": (16, 24),
        "layers.0.self_attn.v_proj.weight": (16, 24),
        "layers.0.self_attn.o_proj.weight": (24, 32),
        "layers.0.self_attn.q_norm.weight": (8,),
        "layers.0.self_attn.k_norm.weight": (8,),
        "layers.0.mlp.gate_proj.weight": (40, 24),
        "layers.0.mlp.up_proj.weight": (40, 24),
        "layers.0.mlp.down_proj.weight": (24, 40),
    }
    assert DFlashDrafter(tiny_config(FULL)).state_dict().keys() == shapes.keys()


def test_initial_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = DFlashDrafter(tiny_config(FULL), seed=7).fc.weight
    torch.manual_seed(2)
    assert torch.equal(first, DFlashDrafter(tiny_config(FULL), seed=7).fc.weight)
    assert not torch.equal(first, DFlashDrafter(tiny_config(FULL), seed=8).fc.weight)


def test_casting_to_bfloat16_leaves_rotary_angles_in_float32() -> None:
    positions = torch.tensor([3, 40_001])
    drafter = DFlashDrafter(tiny_config(FULL))
    before = drafter.rotary.table(positions, torch.float32)
    drafter.to(torch.bfloat16)
    assert drafter.rotary.inv_freq(torch.device("cpu")).dtype == torch.float32
    after = drafter.rotary.table(positions, torch.float32)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    angles = positions.double()[:, None] / 10000.0 ** (torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(before[0][:, 0].double(), angles.cos(), rtol=0, atol=4e-3)


def test_angles_for_bfloat16_are_rounded_last_so_that_far_positions_keep_apart() -> None:
    """bfloat16 has 8 bits: positions from 256 on, or frequencies, rounded to it would turn by other angles."""
    rotary, positions = DFlashDrafter(tiny_config(FULL)).to(torch.bfloat16).rotary, torch.arange(40_000, 40_064)
    for rounded, exact in zip(
        rotary.table(positions, torch.bfloat16), rotary.table(positions, torch.float32), strict=True
    ):
        assert torch.equal(rounded, exact.bfloat16()) and (exact[1:] != exact[:-1]).flatten(1).any(1).all()


def test_bfloat16_autocast_stays_close_to_float32_and_reaches_every_parameter() -> None:
    drafter, (features, block_embeds) = DFlashDrafter(tiny_config(SLIDING, FULL), seed=3), inputs()
    expected = run(drafter, features, block_embeds)
    layout = BlockLayout(ANCHORS, CU_SEQLENS, BLOCK_SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = drafter(block_embeds.bfloat16(), drafter.context(features.bfloat16()), layout)
    assert (hidden.float() - expected).norm() / expected.norm() < 0.02
    gradients = torch.autograd.grad(hidden.float().square().sum(), list(drafter.parameters()))
    assert all(g.dtype == torch.float32 and g.isfinite().all() and g.any() for g in gradients)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mask_token_id": 50}, "vocabulary"),
        ({"mask_token_id": -1}, "vocabulary"),
        ({"pad_token_id": 49}, "pad_token_id"),
        ({"eos_token_id": 49}, "eos_token_id"),
        ({"layer_types": (FULL,)}, "every draft layer"),
        ({"layer_types": (FULL, "linear_attention")}, "unknown layer type"),
        ({"sliding_window": 8}, "disagree"),
        ({"layer_types": (SLIDING, FULL)}, "disagree"),
        ({"layer_types": (SLIDING, FULL), "sliding_window": 3}, "whole block"),
        ({"target_layer_ids": ()}, "empty"),
        ({"target_layer_ids": (1, 5)}, "0-based"),
        ({"target_layer_ids": (1, 1)}, "distinct"),
        ({"block_size": 1}, "block_size"),
        ({"head_dim": 7}, "even"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": 0}, "hidden_size"),
    ],
)
def test_configs_that_cannot_work_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tiny_config(FULL, FULL, **changes)


def dense_target() -> dict[str, Any]:
    return {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "eos_token_id": 2,
    }


def hybrid_target() -> dict[str, Any]:
    text = {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "eos_token_id": 248044,
    }
    return {"model_type": "qwen3_5", "text_config": text}


def test_the_published_27b_drafter_comes_out_with_its_parameter_count() -> None:
    config = DrafterConfig.for_target(
        hybrid_target(), num_layers=5, block_size=16, mask_token_id=248070, sliding_window=2048
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert config.target_layer_ids == (1, 16, 31, 46, 61) and config.rope_theta == 1e7
    assert config.layer_types == (SLIDING,) * 4 + (FULL,) and config.max_position_embeddings == 262144
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    assert round(sum(p.numel() for p in drafter.parameters()) / 1e6, 1) == 1730.2


def test_a_dense_target_passes_on_its_head_shape() -> None:
    config = DrafterConfig.for_target(dense_target(), num_layers=1, block_size=8, mask_token_id=5)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.target_layer_ids == (15,) and config.layer_types == (FULL,) and config.eos_token_id == 2


def without_theta(target: dict[str, Any]) -> None:
    del target["rope_theta"]


def without_width(target: dict[str, Any]) -> None:
    del target["intermediate_size"]


@pytest.mark.parametrize(("break_it", "named"), [(without_theta, "rotary base"), (without_width, "intermediate_size")])
def test_targets_that_do_not_say_enough_are_refused(break_it: Callable[[dict[str, Any]], None], named: str) -> None:
    target = dense_target()
    break_it(target)
    with pytest.raises(ConfigError, match=named):
        DrafterConfig.for_target(target, num_layers=1, block_size=8, mask_token_id=5)
