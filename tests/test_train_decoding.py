"""Speculative decoding gives the target's own greedy answer, for targets that can and cannot take tokens back."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3_5TextConfig, Qwen3Config

from train.anchors import block_targets, block_tokens, decay_weights
from train.attention import BlockLayout
from train.decoding import Decoded, SpeculativeDecoder, decode_plain
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.objective import OutputHead, block_loss
from train.target_parts import TargetParts
from train.target_state import TargetState

VOCAB, HIDDEN, BLOCK_SIZE, MASK, NUM_LAYERS = 64, 32, 4, 63, 4
TAPS = (0, 2, 3)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
KINDS = ("dense", "sliding", "hybrid")


def target_config(kind: str) -> Any:
    if kind == "dense":
        return Qwen3Config(**COMMON)
    if kind == "sliding":
        return Gemma3TextConfig(**COMMON, sliding_window=6)
    return Qwen3_5TextConfig(
        **COMMON,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    )


@cache
def tiny_target(kind: str) -> Any:
    """A random fp32 target, its weights large enough and its head untied so that answers do not repeat at once."""
    torch.manual_seed(0)
    from_config: Any = AutoModelForCausalLM.from_config
    return from_config(target_config(kind), dtype=torch.float32).eval()


def prompt_of(length: int) -> Tensor:
    return torch.randint(VOCAB - 1, (length,), generator=torch.Generator().manual_seed(length))


def parts_of(target: Any) -> TargetParts:
    embedding, lm_head = (m.weight.detach() for m in (target.get_input_embeddings(), target.get_output_embeddings()))
    return TargetParts(embedding, lm_head, torch.ones(HIDDEN), 1e-6, norm_adds_one=False)


def tiny_drafter() -> DFlashDrafter:
    config = DrafterConfig.for_target(
        Qwen3Config(**COMMON).to_dict(), num_layers=2, block_size=BLOCK_SIZE, mask_token_id=MASK, target_layer_ids=TAPS
    )
    return DFlashDrafter(config)


def features_of(target: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad(), TargetState(target, TAPS) as state:
        state.prefill(tokens)
        return state.features()


def overfit(drafter: DFlashDrafter, target: Any, tokens: Tensor, first: int) -> None:
    """Trains on every block of one answer, which begins at row `first`, until every slot is safely right."""
    parts, features = parts_of(target), features_of(target, tokens)
    loss_mask = torch.arange(len(tokens)) >= first
    cu_seqlens = torch.tensor([0, len(tokens)])
    anchors = torch.arange(first, len(tokens) - 1)
    targets = block_targets(anchors, tokens, loss_mask, cu_seqlens, BLOCK_SIZE)
    embeds = parts.embedding[block_tokens(anchors, tokens, BLOCK_SIZE, MASK)]
    layout = BlockLayout(anchors, cu_seqlens, BLOCK_SIZE)
    weights = decay_weights(targets.valid, gamma=4.0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(500):
        hidden = drafter(embeds, drafter.context(features), layout)
        output = block_loss(hidden, targets.labels, weights, OutputHead(parts.lm_head))
        if output.sums.accuracy == 1 and output.nll.max() < 0.5:
            return
        torch.autograd.backward(output.loss / output.sums.weight)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError(f"not learned by heart: accuracy {output.sums.accuracy}")


def plain(target: Any, prompt: Tensor, max_new_tokens: int, stop_ids: tuple[int, ...] = ()) -> Decoded:
    return decode_plain(target, prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids)


@cache
def trained(kind: str) -> DFlashDrafter:
    """A drafter that knows the answer to `prompt_of(9)` by heart."""
    target, prompt = tiny_target(kind), prompt_of(9)
    drafter = tiny_drafter()
    answer = plain(target, prompt, 1 + 10 * BLOCK_SIZE)
    overfit(drafter, target, torch.cat([prompt, torch.tensor(answer.tokens)]), len(prompt))
    return drafter


@pytest.mark.parametrize("kind", KINDS)
def test_plain_decoding_is_what_whole_forward_passes_choose(kind: str) -> None:
    target, tokens = tiny_target(kind), prompt_of(7)
    answer = plain(target, tokens, 20).tokens
    for token in answer:
        with torch.no_grad():
            assert int(target(input_ids=tokens[None]).logits[0, -1].argmax()) == token
        tokens = torch.cat([tokens, torch.tensor([token])])
    assert len(set(answer)) > 3, "an answer that repeats itself tests nothing"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 23])
def test_an_untrained_drafter_changes_nothing_in_the_answer(kind: str, max_new_tokens: int) -> None:
    target = tiny_target(kind)
    decoder = SpeculativeDecoder(target, tiny_drafter(), parts_of(target))
    for length in (1, 5, 11):
        expected = plain(target, prompt_of(length), max_new_tokens)
        found = decoder.decode(prompt_of(length), max_new_tokens=max_new_tokens, stop_ids=())
        assert found.tokens == expected.tokens and len(found.tokens) == max_new_tokens
        assert sum(found.acceptance_lengths) == max_new_tokens - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_overfitted_on_one_answer_accepts_whole_blocks(kind: str) -> None:
    target, prompt, num_blocks = tiny_target(kind), prompt_of(9), 10
    max_new_tokens = 1 + num_blocks * BLOCK_SIZE
    found = SpeculativeDecoder(target, trained(kind), parts_of(target)).decode(
        prompt, max_new_tokens=max_new_tokens, stop_ids=()
    )
    assert found.tokens == plain(target, prompt, max_new_tokens).tokens
    assert found.acceptance_lengths == [BLOCK_SIZE] * num_blocks
    assert found.accepted_at == found.reached_at == found.proposed_at == [num_blocks] * (BLOCK_SIZE - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_partly_accepted_blocks_are_taken_back_without_a_trace(kind: str) -> None:
    """A drafter that knows another answer is right now and then: accepts some, loses some, many times over."""
    target, drafter = tiny_target(kind), copy.deepcopy(trained(kind))
    lengths: set[int] = set()
    for seed, scale in enumerate((0.02, 0.05, 0.1)):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
        found = SpeculativeDecoder(target, drafter, parts_of(target)).decode(
            prompt_of(9), max_new_tokens=60, stop_ids=()
        )
        assert found.tokens == plain(target, prompt_of(9), 60).tokens
        lengths |= set(found.acceptance_lengths)
    assert len(lengths) > 2, "the test needs steps that accept a part of a block"


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_ends_with_the_first_stop_token_wherever_in_a_block_it_falls(kind: str) -> None:
    target, prompt = tiny_target(kind), prompt_of(9)
    answer = plain(target, prompt, 1 + 10 * BLOCK_SIZE).tokens
    decoder = SpeculativeDecoder(target, trained(kind), parts_of(target))
    for stop in dict.fromkeys(answer):
        end = answer.index(stop) + 1
        found = decoder.decode(prompt, max_new_tokens=100, stop_ids={stop})
        assert found.tokens == answer[:end] == plain(target, prompt, 100, (stop,)).tokens
        assert sum(found.acceptance_lengths) == end - 1
        assert sum(found.proposed_at) >= sum(found.reached_at) >= sum(found.accepted_at)


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_outputs_of_the_tapped_layers_even_of_the_last(kind: str) -> None:
    """Except for the last layer, where transformers' own list holds the state after the final norm."""
    target, tokens = tiny_target(kind), prompt_of(13)
    with torch.no_grad():
        states = target(input_ids=tokens[None], output_hidden_states=True).hidden_states
        last = target.get_decoder().norm(features_of(target, tokens)[:, -HIDDEN:])
    found = features_of(target, tokens).view(len(tokens), len(TAPS), HIDDEN).unbind(1)
    for layer, rows in zip(TAPS[:-1], found, strict=False):
        assert torch.equal(rows, states[layer + 1][0])
    torch.testing.assert_close(last, states[NUM_LAYERS][0])


def test_features_of_taps_in_any_order_come_in_that_order() -> None:
    target, tokens = tiny_target("dense"), prompt_of(7)
    ascending = features_of(target, tokens).view(len(tokens), len(TAPS), HIDDEN).unbind(1)
    with torch.no_grad(), TargetState(target, (3, 0, 2)) as state:
        state.prefill(tokens)
        assert torch.equal(state.features(), torch.cat([ascending[TAPS.index(i)] for i in (3, 0, 2)], dim=1))


def test_no_hook_stays_on_the_target() -> None:
    target = tiny_target("dense")
    before = [len(layer._forward_hooks) for layer in target.get_decoder().layers]
    features_of(target, prompt_of(3))
    assert before == [len(layer._forward_hooks) for layer in target.get_decoder().layers]
