"""Which rows become anchors, and the labels of their blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from train.anchors import block_targets, block_tokens, candidates, sample_anchors, slot_weights, streak_weights
from train.config import TrainConfig, default_gamma

Documents = list[list[bool]]
documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=25), min_size=1, max_size=6)


def packed(masks: Documents) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
    cu_seqlens = np.cumsum([0, *map(len, masks)]).astype(np.int32)
    return np.concatenate([np.array(mask, dtype=bool) for mask in masks]), cu_seqlens


def drawn(masks: Documents, samples: list[int], *, rate: float, seed: int = 5, step: int = 9) -> list[list[int]]:
    """Anchors per document, relative to its start."""
    mask, cu_seqlens = packed(masks)
    rows = sample_anchors(mask, cu_seqlens, samples, seed=seed, step=step, anchors_per_supervised=rate)
    assert rows.dtype == np.int64 and (np.diff(rows) > 0).all()
    starts = cu_seqlens[:-1].tolist()
    return [
        [int(row) - start for row in rows if start <= row < start + len(m)]
        for start, m in zip(starts, masks, strict=True)
    ]


@given(documents)
def test_candidates_are_supervised_pairs_inside_one_document(masks: Documents) -> None:
    mask, cu_seqlens = packed(masks)
    expected = [
        start + t
        for start, doc in zip(cu_seqlens.tolist(), masks, strict=False)
        for t in range(len(doc) - 1)
        if doc[t] and doc[t + 1]
    ]
    assert candidates(mask, cu_seqlens).tolist() == expected


@given(documents, st.floats(0, 2), st.integers(0, 2**40))
@settings(max_examples=60)
def test_a_samples_anchors_do_not_depend_on_its_pack(masks: Documents, rate: float, step: int) -> None:
    samples = [7 * i + 3 for i in range(len(masks))]
    together = drawn(masks, samples, rate=rate, step=step)
    assert together[::-1] == drawn(masks[::-1], samples[::-1], rate=rate, step=step)
    for mask, sample, anchors in zip(masks, samples, together, strict=True):
        assert drawn([mask], [sample], rate=rate, step=step) == [anchors]
        allowed = {t for t in range(len(mask) - 1) if mask[t] and mask[t + 1]}
        assert set(anchors) <= allowed
        assert min(len(allowed), int(rate * sum(mask))) <= len(anchors) <= min(len(allowed), int(rate * sum(mask)) + 1)


def test_anchors_change_with_seed_step_and_sample_and_repeat_otherwise() -> None:
    masks = [[True] * 200]
    base = drawn(masks, [4], rate=0.25)
    assert base == drawn(masks, [4], rate=0.25)
    others = [
        drawn(masks, [5], rate=0.25),
        drawn(masks, [4], rate=0.25, seed=6),
        drawn(masks, [4], rate=0.25, step=10),
    ]
    assert all(other != base for other in others)


def test_every_candidate_is_chosen_equally_often_and_the_rate_is_met_on_average() -> None:
    masks, num_steps, rate = [[True] * 33], 2000, 0.15
    counts = np.zeros(33)
    for step in range(num_steps):
        counts[drawn(masks, [0], rate=rate, step=step)[0]] += 1
    assert counts.sum() / num_steps == pytest.approx(rate * 33, abs=0.05)
    expected = counts.sum() / 32
    # Six standard deviations of a binomial count.
    assert counts[32] == 0 and (np.abs(counts[:32] - expected) < 6 * expected**0.5).all()


def test_anchors_are_pinned_for_ever() -> None:
    pinned = [[0, 9, 20, 22, 25, 27, 35, 36], [5, 8]]
    assert drawn([[True] * 40, [False] * 3 + [True] * 10], [0, 1], rate=0.2, seed=0, step=0) == pinned


def test_labels_stop_at_the_document_and_skip_unsupervised_slots() -> None:
    input_ids = torch.tensor([10, 11, 12, 13, 14, 20, 21, 22])
    loss_mask = torch.tensor([False, True, True, False, True, True, True, True])
    cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
    targets = block_targets(torch.tensor([1, 3, 6]), input_ids, loss_mask, cu_seqlens, block_size=4)
    assert targets.labels.tolist() == [[11, 12, 13, 14], [13, 14, 0, 0], [21, 22, 0, 0]]
    assert targets.valid.tolist() == [
        [False, True, False, True],
        [False, True, False, False],
        [False, True, False, False],
    ]


def test_block_input_is_the_anchor_token_then_mask_tokens() -> None:
    tokens = block_tokens(torch.tensor([2, 0]), torch.tensor([5, 6, 7]), block_size=3, mask_token_id=99)
    assert tokens.tolist() == [[7, 99, 99], [5, 99, 99]]


def test_streak_weights_of_two_blocks_computed_by_hand() -> None:
    """Smoothed with 1/2: 3/4, 5/8, 1. Block 2 has no supervised label at slot 2: as if that slot did not exist."""
    probability = torch.tensor([[0.9, 0.5, 0.25, 1.0], [0.9, 0.5, 0.0, 1.0]])
    valid = torch.tensor([[False, True, True, True], [False, True, False, True]])
    reached = [0.75, 0.75 * 0.625, 0.75 * 0.625]
    expected = [[0, sum(reached), sum(reached[1:]), reached[2]], [0, 0.75 + 0.75, 0, 0.75]]
    torch.testing.assert_close(streak_weights(probability, valid), torch.tensor(expected))


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_streak_weights_are_the_sensitivity_of_the_expected_streak(seed: int) -> None:
    """The weight of slot j is the derivative of the smoothed expected length with respect to log q'_j."""
    generator = torch.Generator().manual_seed(seed)
    probability = torch.rand(3, 6, generator=generator, dtype=torch.float64)
    valid = torch.rand(3, 6, generator=generator) < 0.7
    logs = (0.5 + 0.5 * probability).log().requires_grad_()
    length = logs.new_zeros(())
    for block, slot in valid.nonzero().tolist():
        length = length + (logs[block, : slot + 1] * valid[block, : slot + 1]).sum().exp()
    (expected,) = torch.autograd.grad(length, logs) if valid.any() else (torch.zeros(3, 6, dtype=torch.float64),)
    torch.testing.assert_close(streak_weights(probability, valid).double(), expected, rtol=1e-5, atol=1e-6)


def test_streak_weights_carry_no_gradient() -> None:
    probability = torch.full((1, 3), 0.5, requires_grad=True)
    assert not streak_weights(probability, torch.tensor([[False, True, True]])).requires_grad


def test_slots_weigh_by_the_papers_decay_unless_something_else_is_asked_for() -> None:
    """Appendix A.1: gamma 7, 5, 4 for blocks of 16, 10, 8. Without decay, or with a slow one, late slots count most."""
    for block_size, gamma in ((16, 7.0), (10, 5.0), (8, 4.0)):
        config = TrainConfig(store=Path("s"), out=Path("r"), block_size=block_size, mask_token_id=1)
        assert (config.slot_weights, config.slot_gamma) == ("decay", gamma)
    assert default_gamma(12) == pytest.approx(12 / 2.2)


def test_weights_before_the_drafter_has_run() -> None:
    valid = torch.tensor([[False, True, True], [False, False, True]])
    assert torch.equal(slot_weights(valid, "uniform", gamma=2.0), valid.float())
    assert torch.equal(slot_weights(valid, "dpace", gamma=2.0), valid.float())
    e = float(torch.tensor(-0.5).exp())
    torch.testing.assert_close(slot_weights(valid, "decay", gamma=2.0), torch.tensor([[0, 1, e], [0, 0, e]]))
