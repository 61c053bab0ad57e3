"""Which of the target's rows a slot learns from, and training from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_loop import settings
from torch import Tensor

from cache_tools.errors import ConfigError, StoreError
from cache_tools.reader import Store
from cache_tools.synthetic import make_store
from train.batches import Pack, StepBatch, TeacherRows
from train.loop import train, train_step
from train.objective import BlockSums
from train.state import TrainingState, prepare
from train.target_parts import FinalNorm
from train.teacher import block_teacher, require_teacher

NORM = FinalNorm(torch.zeros(4), 1e-6, adds_one=True)


def test_slot_k_learns_from_the_row_before_the_token_it_predicts() -> None:
    rows = TeacherRows(hidden=torch.randn(10, 4))
    teacher = block_teacher(rows, torch.tensor([2, 8, 0]), 4, NORM)
    # Slot 0 carries no loss, nor do slots past the end of the pack: any row will do.
    assert teacher.index.tolist() == [[1, 2, 3, 4], [7, 8, 9, 9], [0, 0, 1, 2]]


def test_a_slice_of_whole_teacher_rows_is_the_targets_own_logits() -> None:
    """norm(h) * (1 + w) by hand: RMS 1 of (1, -1, 1, -1), 2 of (2, 2, 2, 2); bfloat16 as the target had it."""
    rows = TeacherRows(hidden=torch.tensor([[1.0, -1, 1, -1], [2, 2, 2, 2]], dtype=torch.bfloat16))
    norm = FinalNorm(torch.tensor([0.0, 1.0, 2.0, 3.0]), 0.0, adds_one=True)
    teacher = block_teacher(rows, torch.tensor([1]), 3, norm).select(torch.tensor([1, 2]))
    said = teacher.of_slice(slice(0, 2), torch.eye(4))
    assert said.logits is not None
    assert said.logits.tolist() == [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]
    before = (
        block_teacher(rows, torch.tensor([1]), 3, norm).select(torch.tensor([0])).of_slice(slice(0, 1), torch.eye(4))
    )
    assert before.logits is not None and before.logits.tolist() == [[1.0, -2.0, 3.0, -4.0]]


def test_a_slice_of_listed_tokens_is_what_was_stored() -> None:
    logprobs = torch.tensor([[0.5, 0.25], [0.125, 0.125]]).log()
    rows = TeacherRows(None, torch.tensor([[3, 1], [0, 2]], dtype=torch.int32), logprobs)
    said = (
        block_teacher(rows, torch.tensor([1]), 3, NORM)
        .select(torch.tensor([0, 1, 2]))
        .of_slice(slice(0, 2), torch.eye(4))
    )
    assert said.ids is not None and said.probabilities is not None and said.logits is None
    assert said.ids.tolist() == [[3, 1], [0, 2]]
    torch.testing.assert_close(said.probabilities, torch.tensor([[0.5, 0.25], [0.125, 0.125]]))


def test_teacher_rows_have_one_form() -> None:
    ids, logprobs = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    for wrong in ((None, None, None), (torch.zeros(3, 4), ids, logprobs), (None, ids, None)):
        with pytest.raises(AssertionError):
            TeacherRows(*wrong)


def test_a_store_without_teacher_refuses_kl_before_anything_is_written(tmp_path: Path) -> None:
    make_store(tmp_path / "s.zarr", [20] * 4)
    config = settings(tmp_path / "s.zarr", tmp_path / "run", kl_weight=0.5)
    with pytest.raises(StoreError, match=r"(?s)--kl-weight 0\.5.*--kl-weight 0"):
        train(config, say=lambda _: None)
    assert not (tmp_path / "run").exists()


def test_a_restricted_head_refuses_listed_tokens_only(tmp_path: Path) -> None:
    def check(teacher: str, **changes: Any) -> None:
        path = tmp_path / teacher
        store = Store.open(path) if path.exists() else make_store(path, [20] * 2, teacher=teacher)
        require_teacher(settings(path, tmp_path / "run", **changes), store)

    check("none", loss_vocab="seen")
    check("hidden", kl_weight=1.0, loss_vocab="seen")
    check("topk:4", kl_weight=1.0)
    with pytest.raises(ConfigError, match="--loss-vocab"):
        check("topk:4", kl_weight=1.0, loss_vocab="seen")


def with_teacher(state: TrainingState, batch: StepBatch, num_listed: int | None) -> StepBatch:
    """The step with a teacher that says after each token which one follows it in a fixed cycle, and is sure of it."""

    def rows_of(pack: Pack) -> TeacherRows:
        says = state.head.weight[(pack.input_ids * 5 + 1) % 64].float() * 30
        if num_listed is None:
            return TeacherRows(hidden=says.to(torch.bfloat16))
        logits = state.final_norm(says) @ state.head.weight.T.float()
        top = logits.log_softmax(-1).topk(num_listed)
        return TeacherRows(None, top.indices.int(), top.values)

    return replace(batch, packs=[replace(pack, teacher=rows_of(pack)) for pack in batch.packs])


@pytest.mark.parametrize("num_listed", [None, 8])
def test_a_run_with_kl_alone_learns_what_the_teacher_says_and_not_the_data(
    tmp_path: Path, num_listed: int | None
) -> None:
    make_store(tmp_path / "s.zarr", [16] * 4, teacher="hidden" if num_listed is None else f"topk:{num_listed}")
    config = settings(
        tmp_path / "s.zarr", tmp_path / "run", kl_weight=1.0, anchors_per_step=64, slot_weights="dpace", steps=60
    )
    state = prepare(config, lambda _: None)
    curve: list[BlockSums] = []
    with state.open_loader() as loader:
        for batch in loader:
            sums, _ = train_step(state, with_teacher(state, batch, num_listed), lr=1e-2, noise=0.0)
            curve.append(sums)
            state.step += 1
            if state.step == state.total_steps:
                break
    first, last = ([sums.mean_loss for sums in part] for part in (curve[:5], curve[-5:]))
    assert 0 <= sum(last) < 0.5 * sum(first)
    accuracy = sum(sums.accuracy for sums in curve[-5:]) / 5
    assert accuracy < 0.2, "the data's tokens are random, and were not looked at"


def test_a_loader_that_forgets_the_teacher_is_a_programmers_error(
    tmp_path: Path,
) -> None:
    make_store(tmp_path / "s.zarr", [16] * 4, teacher="hidden")
    state = prepare(settings(tmp_path / "s.zarr", tmp_path / "run", kl_weight=1.0), lambda _: None)
    anchors: Tensor = torch.tensor([1])
    with pytest.raises(AssertionError, match="teacher"):
        state.teacher(None, anchors)
