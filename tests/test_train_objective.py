"""The sliced loss over a frozen head, against plain autograd and hand-computed numbers."""

from __future__ import annotations

from itertools import pairwise
from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from train.anchors import decay_weights
from train.objective import BlockSums, OutputHead, block_loss

NUM_BLOCKS, BLOCK_SIZE, HIDDEN, VOCAB = 5, 4, 8, 23


def example(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [A, B, H], labels, weights with some zeros, head [V, H]; float64."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_BLOCKS, BLOCK_SIZE, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (NUM_BLOCKS, BLOCK_SIZE), generator=generator)
    weights = torch.rand(NUM_BLOCKS, BLOCK_SIZE, generator=generator)
    weights[:, 0] = 0
    weights[2, 2:] = 0
    head = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    return hidden, labels, weights, head


def plain_loss(hidden: Tensor, labels: Tensor, weights: Tensor, head: Tensor) -> Tensor:
    nll = F.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten(), reduction="none")
    return (nll.view(labels.shape) * weights).sum()


@pytest.mark.parametrize("slice_elements", [1, 3 * VOCAB, None])
def test_loss_and_gradient_equal_plain_autograd_whatever_the_slices(slice_elements: int | None) -> None:
    hidden, labels, weights, head = example()
    plain, sliced = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    expected = plain_loss(plain, labels, weights.double(), head)
    output = block_loss(sliced, labels, weights, OutputHead(head), slice_elements=slice_elements)
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=1e-5)
    (wanted,) = torch.autograd.grad(expected * 3, plain)
    (found,) = torch.autograd.grad(output.loss * 3, sliced)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert not found[weights == 0].any()


def test_bfloat16_head_stays_close_to_float64() -> None:
    hidden, labels, weights, head = example()
    low = hidden.to(torch.bfloat16).requires_grad_()
    output = block_loss(low, labels, weights, OutputHead(head.to(torch.bfloat16)))
    expected = plain_loss(low.detach().double(), labels, weights.double(), head.to(torch.bfloat16).double())
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss.double(), expected, rtol=2e-2, atol=0)
    assert torch.autograd.grad(output.loss, low)[0].dtype == torch.bfloat16


def test_per_slot_results_equal_those_of_whole_logits() -> None:
    hidden, labels, weights, head = example(1)
    output = block_loss(hidden, labels, weights, OutputHead(head))
    probabilities = (hidden @ head.T).softmax(-1)
    of_label = probabilities.gather(-1, labels[..., None])[..., 0]
    valid = weights > 0
    torch.testing.assert_close(output.label_probability[valid].double(), of_label[valid], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.nll[valid].double(), -of_label[valid].log(), rtol=1e-5, atol=1e-5)
    assert torch.equal(output.correct, (probabilities.argmax(-1) == labels) & valid)


def test_without_gradient_nothing_is_kept_for_backward() -> None:
    hidden, labels, weights, head = example()
    with torch.no_grad():
        assert not block_loss(hidden.requires_grad_(), labels, weights, OutputHead(head)).loss.requires_grad


def test_a_pack_without_supervised_slots_gives_zero_and_a_backward_pass() -> None:
    hidden, labels, weights, head = example()
    hidden.requires_grad_()
    output = block_loss(hidden, labels, torch.zeros_like(weights), OutputHead(head))
    assert output.loss == 0 and not torch.autograd.grad(output.loss, hidden)[0].any()
    assert output.sums.mean_loss == 0 and output.sums.streak == 1 and output.sums.accuracy == 0


def test_decay_weights_of_two_blocks_computed_by_hand() -> None:
    """Gamma 7. Block 1 runs out of its document after slot 2; block 2 has a masked label at slot 2."""
    valid = torch.tensor([[False, True, True, False], [False, True, False, True]])
    weights = decay_weights(valid, gamma=7.0)
    expected = [[0, 1, exp(-1 / 7), 0], [0, 1, 0, exp(-2 / 7)]]
    torch.testing.assert_close(weights, torch.tensor(expected))

    head = torch.eye(3)
    hidden = torch.zeros(2, 4, 3)
    hidden[0, 1, 2] = 2.0  # logits 0, 0, 2
    labels = torch.tensor([[0, 2, 1, 0], [0, 1, 0, 2]])
    output = block_loss(hidden, labels, weights, OutputHead(head))
    certain = torch.log(torch.tensor(2 + exp(2))).item() - 2
    uniform = torch.log(torch.tensor(3.0)).item()
    numerator = certain + exp(-1 / 7) * uniform + uniform + exp(-2 / 7) * uniform
    denominator = 2 + exp(-1 / 7) + exp(-2 / 7)
    assert output.loss.item() == pytest.approx(numerator, rel=1e-6)
    assert output.sums.mean_loss == pytest.approx(numerator / denominator, rel=1e-6)


def one_hot_hidden(predictions: Tensor) -> Tensor:
    return F.one_hot(predictions, VOCAB).float() * 9


def test_accepted_prefix_ends_at_the_first_wrong_or_invalid_slot() -> None:
    labels = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    predictions = torch.tensor([[9, 2, 3, 4], [9, 2, 9, 4], [9, 9, 3, 4], [9, 2, 3, 4]])
    weights = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1.0]])
    sums = block_loss(one_hot_hidden(predictions), labels, weights, OutputHead(torch.eye(VOCAB))).sums
    assert sums.accepted == 3 + 1 + 0 + 1 and sums.blocks == 4
    assert sums.streak == 1 + 5 / 4
    assert sums.correct_at.tolist() == [0, 3, 2, 4] and sums.valid_at.tolist() == [0, 4, 3, 4]
    assert sums.accuracy == 9 / 11 and sums.accuracy_at == [3 / 4, 2 / 3, 1]


def test_restricted_head_is_softmax_over_its_tokens_and_counts_what_it_leaves_out() -> None:
    hidden, labels, weights, head = example(2)
    vocab_ids = torch.tensor(sorted(set(labels.flatten().tolist()), reverse=True)[::2])
    inside = torch.isin(labels, vocab_ids)
    restricted = OutputHead.restricted(head, vocab_ids)
    hidden.requires_grad_()
    output = block_loss(hidden, labels, weights, restricted)
    (found,) = torch.autograd.grad(output.loss, hidden)

    positions = {int(token): i for i, token in enumerate(vocab_ids)}
    relabelled = torch.tensor([[positions.get(int(token), 0) for token in row] for row in labels])
    plain = hidden.detach().clone().requires_grad_()
    expected = plain_loss(plain, relabelled, weights.double() * inside, head[vocab_ids])
    (wanted,) = torch.autograd.grad(expected, plain)
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert output.sums.left_out == ((weights > 0) & ~inside).sum() > 0
    assert output.sums.weight.item() == pytest.approx((weights * inside).sum().item(), rel=1e-6)
    assert output.sums.valid_at.sum() == (weights > 0).sum()


@given(st.lists(st.integers(0, NUM_BLOCKS), min_size=1, max_size=3, unique=True))
@settings(max_examples=10, deadline=None)
def test_sums_over_parts_add_up_to_the_sums_of_the_whole(cuts: list[int]) -> None:
    hidden, labels, weights, head = example(3)
    whole = block_loss(hidden, labels, weights, OutputHead(head)).sums
    total = BlockSums.zero(BLOCK_SIZE)
    edges = [0, *sorted(cuts), NUM_BLOCKS]
    for first, end in pairwise(edges):
        part = slice(first, end)
        total = total + block_loss(hidden[part], labels[part], weights[part], OutputHead(head)).sums
    torch.testing.assert_close(total.vector(), whole.vector(), rtol=1e-6, atol=1e-6)
    assert torch.equal(BlockSums.from_vector(whole.vector()).vector(), whole.vector())
