"""Losses of rows of logits and their gradients, against the formulas in float64 and numbers computed by hand."""

from __future__ import annotations

from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import expected, lumped_kl, make_case
from torch import Tensor

from train.loss_rows import PLAIN, SliceTeacher, row_losses

KL_WEIGHTS = [0.0, 0.3, 1.0]
LISTED = [None, 1, 7, 50]  # 50 = all


def logits_of(probabilities: list[float]) -> Tensor:
    return torch.tensor([probabilities]).log()


@pytest.mark.parametrize("num_listed", LISTED)
@pytest.mark.parametrize("kl_weight", KL_WEIGHTS)
def test_losses_and_gradient_equal_the_formulas_in_float64(num_listed: int | None, kl_weight: float) -> None:
    case = make_case(9, 50, num_listed)
    found = row_losses(
        case.logits.float(), case.labels, case.teacher(torch.float32), kl_weight, kernels=PLAIN, with_gradient=True
    )
    loss, nll, gradient = expected(case, kl_weight)
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.nll.double(), nll, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.best, case.logits.argmax(1))
    assert found.gradient is not None
    torch.testing.assert_close(found.gradient.double(), gradient, rtol=1e-4, atol=1e-6)


def test_kl_to_listed_tokens_computed_by_hand() -> None:
    """Teacher 1/2, 1/4 and 1/4 elsewhere; drafter 1/4 and 1/4 there, 1/8 + 3/8 elsewhere."""
    teacher = SliceTeacher(ids=torch.tensor([[2, 0]]), probabilities=torch.tensor([[0.5, 0.25]]))
    found = row_losses(
        logits_of([0.25, 0.125, 0.25, 0.375]), torch.tensor([3]), teacher, 1.0, kernels=PLAIN, with_gradient=True
    )
    by_hand = 0.5 * log(0.5 / 0.25) + 0.25 * log(0.25 / 0.25) + 0.25 * log(0.25 / 0.5)
    assert found.loss.item() == pytest.approx(by_hand, rel=1e-6)
    assert found.nll.item() == pytest.approx(-log(0.375), rel=1e-6)
    assert found.gradient is not None
    # q - p where listed; elsewhere the rest of p, shared out as q does: 1/4 * (1/8, 3/8) / (1/2).
    by_hand_gradient = [0.0, 0.125 - 0.0625, 0.25 - 0.5, 0.375 - 0.1875]
    torch.testing.assert_close(found.gradient, torch.tensor([by_hand_gradient]), rtol=1e-5, atol=1e-7)


def test_a_mixture_with_the_whole_teacher_computed_by_hand() -> None:
    teacher = SliceTeacher(logits=logits_of([0.5, 0.5]) + 3)
    found = row_losses(logits_of([0.25, 0.75]) - 1, torch.tensor([0]), teacher, 0.25, kernels=PLAIN, with_gradient=True)
    kl = 0.5 * log(0.5 / 0.25) + 0.5 * log(0.5 / 0.75)
    assert found.loss.item() == pytest.approx(0.75 * log(4) + 0.25 * kl, rel=1e-6)
    assert found.gradient is not None
    by_hand = [0.25 - 0.75 - 0.25 * 0.5, 0.75 - 0.25 * 0.5]
    torch.testing.assert_close(found.gradient, torch.tensor([by_hand]), rtol=1e-5, atol=1e-7)


def test_a_drafter_equal_to_its_teacher_has_no_kl_and_no_gradient() -> None:
    case = make_case(4, 30, None)
    for num_listed in (None, 5):
        same = type(case)(case.logits, case.labels, case.logits, num_listed)
        found = row_losses(
            case.logits.float(), case.labels, same.teacher(torch.float32), 1.0, kernels=PLAIN, with_gradient=True
        )
        assert found.gradient is not None
        assert found.loss.abs().max() < 1e-5 and found.gradient.abs().max() < 1e-6


@given(st.integers(0, 10_000))
@settings(max_examples=8, deadline=None)
def test_listing_more_tokens_raises_the_kl_towards_that_of_all(seed: int) -> None:
    case = make_case(3, 12, None, seed=seed)
    previous = torch.zeros(3)
    for num_listed in (1, 2, 5, 11, 12):
        teacher = type(case)(case.logits, case.labels, case.teacher_logits, num_listed).teacher(torch.float32)
        found = row_losses(case.logits.float(), case.labels, teacher, 1.0, kernels=PLAIN, with_gradient=False).loss
        assert (found >= previous - 1e-5).all()
        previous = found
    whole = lumped_kl(case.teacher_logits, case.logits, None)
    torch.testing.assert_close(previous.double(), whole, rtol=1e-5, atol=1e-5)


def test_a_drafter_that_leaves_nothing_to_the_rest_keeps_a_finite_and_right_gradient() -> None:
    """All but the first token together have 1e-20 of the drafter and 0.4 of the teacher."""
    logits = torch.tensor([[46.0, 0.0, 0.0, 0.0]])
    teacher = SliceTeacher(ids=torch.tensor([[0]]), probabilities=torch.tensor([[0.6]]))
    found = row_losses(logits, torch.tensor([0]), teacher, 1.0, kernels=PLAIN, with_gradient=True)
    wide = torch.tensor([46.0, 0.0, 0.0, 0.0], dtype=torch.float64).softmax(0)
    by_formula = 0.6 * (0.6 / wide[0]).log() + 0.4 * (0.4 / wide[1:].sum()).log()
    assert found.loss.item() == pytest.approx(by_formula.item(), rel=1e-6)
    assert found.gradient is not None
    torch.testing.assert_close(found.gradient, torch.tensor([[0.4, -0.4 / 3, -0.4 / 3, -0.4 / 3]]))


def test_probabilities_that_rounding_lifts_above_one_leave_no_rest() -> None:
    teacher = SliceTeacher(ids=torch.tensor([[0, 1]]), probabilities=torch.tensor([[0.75, 0.2500001]]))
    found = row_losses(torch.zeros(1, 3), torch.tensor([0]), teacher, 1.0, kernels=PLAIN, with_gradient=True)
    assert found.loss.item() == pytest.approx(0.75 * log(0.75 * 3) + 0.25 * log(0.25 * 3), rel=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 2, 511, 512, 513, 1024, 1300])
def test_rows_of_any_length_with_ties_and_excluded_tokens(num_tokens: int) -> None:
    """Of equal logits the first is best; tokens at -inf have no probability."""

    @given(st.integers(0, 10**9), st.integers(1, 5), st.sampled_from([0.0, 0.1, 0.99]))
    @settings(max_examples=15, deadline=None)
    def check(seed: int, levels: int, excluded: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(levels, (4, num_tokens), generator=generator).float() - 2
        logits[torch.rand(logits.shape, generator=generator) < excluded] = float("-inf")
        labels = torch.randint(num_tokens, (4,), generator=generator)
        logits[torch.arange(4), labels] = -1.0
        best = [row.index(max(row)) for row in logits.tolist()]
        probabilities = logits.double().softmax(1)
        given_memory = logits.clone()
        found = row_losses(given_memory, labels, None, 0.0, kernels=PLAIN, with_gradient=True)
        assert found.best.tolist() == best
        wanted = probabilities.gather(1, labels[:, None]).squeeze(1).log().neg()
        torch.testing.assert_close(found.loss.double(), wanted, rtol=1e-5, atol=1e-6)
        assert found.gradient is not None and found.gradient.data_ptr() == given_memory.data_ptr()
        by_formula = probabilities - torch.nn.functional.one_hot(labels, num_tokens)
        torch.testing.assert_close(found.gradient.double(), by_formula, rtol=1e-5, atol=1e-6)

    check()


def test_without_gradient_none_is_given() -> None:
    case = make_case(3, 20, 4)
    teacher = case.teacher(torch.float32)
    assert (
        row_losses(case.logits.float(), case.labels, teacher, 0.5, kernels=PLAIN, with_gradient=False).gradient is None
    )
