"""The sliced loss over a frozen head, against plain autograd and hand-computed numbers."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import lumped_kl
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from train.anchors import decay_weights, slot_weights, streak_weights
from train.batches import TeacherRows
from train.objective import BlockSums, OutputHead, block_loss
from train.target_parts import FinalNorm
from train.teacher import BlockTeacher

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


HALF, QUARTER = log(2), log(2 / 3)  # logits of the label beside two of 0 that make it 2 / (2 + 2), (2/3) / (2/3 + 2)
# Block 1 has labels of probability 1/2, 1/4, 1/2 and cross entropies of 1, 2, 1 times ln 2; block 2 has one of 1/2 and
# runs out of its document. Decay with exp(-1 / gamma) = 1/2. D-PACE smooths to 3/4, 5/8, 3/4: chances to come as far
# 96/128, 60/128, 45/128, and in block 2 96/128. Last, the mean loss in ln 2:
BY_HAND: dict[str, tuple[list[list[float]], float]] = {
    "uniform": ([[0, 1, 1, 1], [0, 1, 0, 0]], (1 + 2 + 1 + 1) / 4),
    "decay": ([[0, 1, 1 / 2, 1 / 4], [0, 1, 0, 0]], (1 + 2 / 2 + 1 / 4 + 1) / 2.75),
    "dpace": ([[0, 201 / 128, 105 / 128, 45 / 128], [0, 96 / 128, 0, 0]], (201 + 2 * 105 + 45 + 96) / 447),
}


@pytest.mark.parametrize("kind", ["uniform", "decay", "dpace"])
def test_weights_and_mean_loss_of_two_blocks_computed_by_hand(kind: Literal["uniform", "decay", "dpace"]) -> None:
    hidden = torch.zeros(2, 4, 3)
    labels = torch.tensor([[0, 1, 2, 0], [0, 2, 0, 0]])
    for block, slot, logit in ((0, 1, HALF), (0, 2, QUARTER), (0, 3, HALF), (1, 1, HALF)):
        hidden[block, slot, labels[block, slot]] = logit
    valid = torch.tensor([[False, True, True, True], [False, True, False, False]])
    weights = slot_weights(valid, kind, gamma=1 / log(2))
    output = block_loss(hidden, labels, weights, OutputHead(torch.eye(3)), streak_aware=kind == "dpace")
    rows, mean_loss = BY_HAND[kind]
    expected = torch.tensor(rows, dtype=torch.float32)
    torch.testing.assert_close(output.weights, expected)
    assert output.sums.weight.item() == pytest.approx(expected.sum().item())
    assert output.sums.mean_loss == pytest.approx(mean_loss * log(2))


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


NUM_ROWS = 11
NORM = FinalNorm(torch.linspace(-0.5, 0.5, HIDDEN), 1e-6, adds_one=True)


def teacher_of(head: Tensor, num_listed: int | None, seed: int = 7) -> tuple[BlockTeacher, Tensor]:
    """A teacher of the example's slots, with rows shared between slots, and its logits [A, B, V] in float64."""
    generator = torch.Generator().manual_seed(seed)
    last_hidden = torch.randn(NUM_ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    index = torch.randint(NUM_ROWS, (NUM_BLOCKS, BLOCK_SIZE), generator=generator)
    scale = last_hidden / (last_hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    logits = scale * (1 + NORM.weight.double()) @ head.T
    if num_listed is None:
        return BlockTeacher(TeacherRows(hidden=last_hidden), index, NORM), logits[index]
    logprobs, ids = logits.log_softmax(-1).topk(num_listed)
    return BlockTeacher(TeacherRows(None, ids.int(), logprobs.float()), index, NORM), logits[index]


@pytest.mark.parametrize("slice_elements", [1, 3 * VOCAB, None])
@pytest.mark.parametrize("num_listed", [None, 5])
@pytest.mark.parametrize("kl_weight", [0.4, 1.0])
def test_kl_and_its_gradient_equal_plain_autograd_whatever_the_slices(
    kl_weight: float, num_listed: int | None, slice_elements: int | None
) -> None:
    hidden, labels, weights, head = example()
    teacher, teacher_logits = teacher_of(head, num_listed)
    plain, sliced = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    kl = lumped_kl(teacher_logits.flatten(0, 1), (plain @ head.T).flatten(0, 1), num_listed).view(labels.shape)
    ce = plain_loss(plain, labels, weights.double(), head)
    expected = (1 - kl_weight) * ce + kl_weight * (kl * weights.double()).sum()
    output = block_loss(
        sliced, labels, weights, OutputHead(head), teacher=teacher, kl_weight=kl_weight, slice_elements=slice_elements
    )
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert output.sums.loss.item() == pytest.approx(expected.detach().item(), rel=1e-5)
    (wanted,) = torch.autograd.grad(expected, plain)
    (found,) = torch.autograd.grad(output.loss, sliced)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_teacher_without_kl_weight_changes_nothing() -> None:
    hidden, labels, weights, head = example()
    teacher, _ = teacher_of(head, None)
    with_teacher = block_loss(hidden, labels, weights, OutputHead(head), teacher=teacher, kl_weight=0.0)
    assert torch.equal(with_teacher.loss, block_loss(hidden, labels, weights, OutputHead(head)).loss)


def test_with_a_restricted_head_the_teacher_speaks_about_its_tokens_only() -> None:
    hidden, labels, weights, head = example(2)
    vocab_ids = torch.arange(0, VOCAB, 2)
    labels = labels // 2 * 2  # all of them are in the head
    teacher, teacher_logits = teacher_of(head, None)
    output = block_loss(hidden, labels, weights, OutputHead.restricted(head, vocab_ids), teacher=teacher, kl_weight=1.0)
    kl = lumped_kl(teacher_logits[..., ::2].flatten(0, 1), (hidden @ head[::2].T).flatten(0, 1), None)
    torch.testing.assert_close(output.loss.double(), (kl.view(labels.shape) * weights).sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slice_elements", [1, None])
def test_streak_aware_weights_come_from_the_same_pass_and_carry_no_gradient(slice_elements: int | None) -> None:
    hidden, labels, weights, head = example(4)
    valid = weights > 0
    plain, sliced = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    of_label = (plain @ head.T).softmax(-1).gather(-1, labels[..., None])[..., 0]
    dynamic = streak_weights(of_label.detach(), valid)
    expected = plain_loss(plain, labels, dynamic.double(), head)
    output = block_loss(
        sliced, labels, valid.float(), OutputHead(head), streak_aware=True, slice_elements=slice_elements
    )
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.weights, dynamic, rtol=1e-5, atol=1e-6)
    assert output.sums.weight.item() == pytest.approx(dynamic.sum().item(), rel=1e-5)
    (wanted,) = torch.autograd.grad(expected, plain)
    torch.testing.assert_close(torch.autograd.grad(output.loss, sliced)[0], wanted, rtol=1e-4, atol=1e-6)


def test_every_weighting_gives_a_mean_over_the_same_slots_so_that_one_learning_rate_serves() -> None:
    """Slots that all have the same loss give that loss and the same gradient norm, whatever their weights."""
    hidden, labels = torch.zeros(3, BLOCK_SIZE, HIDDEN), torch.zeros(3, BLOCK_SIZE, dtype=torch.int64)
    hidden[..., 0] = 1.0
    head = OutputHead(torch.eye(VOCAB, HIDDEN))
    valid = torch.tensor([[False, True, True, True], [False, True, False, False], [False, True, True, False]])
    outcomes = []
    for weights, streak_aware in ((valid.float(), False), (decay_weights(valid, 2.0), False), (valid.float(), True)):
        leaf = hidden.clone().requires_grad_()
        output = block_loss(leaf, labels, weights, head, streak_aware=streak_aware)
        (gradient,) = torch.autograd.grad(output.loss / output.sums.weight, leaf)
        outcomes.append((output.sums.mean_loss, float(gradient.sum(dim=(0, 1)).norm())))
    assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-6) and outcomes[2] == pytest.approx(outcomes[0], rel=1e-6)


def test_a_label_that_the_head_leaves_out_halves_the_weight_of_the_slots_after_it() -> None:
    hidden = torch.zeros(1, 4, HIDDEN)
    labels = torch.tensor([[0, 1, 5, 1]])
    head = OutputHead.restricted(torch.eye(VOCAB, HIDDEN), torch.tensor([0, 1]))  # each label of two has 1/2
    weights = torch.tensor([[0.0, 1, 1, 1]])
    output = block_loss(hidden, labels, weights, head, streak_aware=True)
    reached = [0.75, 0.75 * 0.5, 0.75 * 0.5 * 0.75]
    torch.testing.assert_close(output.weights, torch.tensor([[0, sum(reached), 0, reached[2]]]))


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Remembers the most elements of any tensor that is made."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


@pytest.mark.parametrize(("num_tokens", "slice_elements"), [(1000, 20_000), (100, 4000)])
@pytest.mark.parametrize("num_listed", [None, 5])
def test_no_tensor_is_larger_than_a_slice_or_the_hidden_states(
    num_listed: int | None, num_tokens: int, slice_elements: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_blocks = 300
    hidden = torch.randn(num_blocks, BLOCK_SIZE, HIDDEN, generator=generator).requires_grad_()
    head = torch.randn(num_tokens, HIDDEN, generator=generator)
    labels = torch.randint(num_tokens, (num_blocks, BLOCK_SIZE), generator=generator)
    rows = torch.randn(50, HIDDEN, generator=generator)
    listed = (rows @ head.T).log_softmax(-1).topk(5)
    teacher_rows = TeacherRows(rows) if num_listed is None else TeacherRows(None, listed.indices.int(), listed.values)
    index = torch.randint(50, labels.shape, generator=generator)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        output = block_loss(
            hidden,
            labels,
            torch.ones(num_blocks, BLOCK_SIZE),
            OutputHead(head),
            teacher=BlockTeacher(teacher_rows, index, NORM),
            kl_weight=0.5,
            streak_aware=True,
            slice_elements=slice_elements,
        )
        torch.autograd.backward(output.loss)
    assert largest.num_elements == max(slice_elements, hidden.numel()) < num_blocks * BLOCK_SIZE * num_tokens / 10


def test_a_few_rows_take_no_more_memory_than_their_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(1000, HIDDEN, generator=generator).bfloat16()
    hidden = torch.randn(2, BLOCK_SIZE, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(1000, (2, BLOCK_SIZE), generator=generator)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        block_loss(hidden, labels, torch.ones(2, BLOCK_SIZE), OutputHead(head))
    assert largest.num_elements == 2 * BLOCK_SIZE * 1000
