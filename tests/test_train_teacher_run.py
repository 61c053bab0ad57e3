"""Training towards the target's own prediction, from the store to the loss."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_train_loop import losses, run, settings, weights

from cache_tools.errors import ConfigError, StoreError
from cache_tools.synthetic import make_store
from train.loader import Loader, pack_plan
from train.loop import train_step
from train.state import prepare

LENGTHS = [30, 12, 44, 25, 17, 38, 9, 28] * 3
KINDS = ["hidden", "hidden:all", "topk:64", "topk:5"]


def store_with(path: Path, teacher: str) -> Any:
    return make_store(path / teacher.replace(":", "-"), LENGTHS, teacher=teacher)


@pytest.mark.parametrize("teacher", KINDS)
def test_packs_carry_the_stored_rows_of_their_samples(teacher: str, tmp_path: Path) -> None:
    store = store_with(tmp_path, teacher)
    plan = pack_plan(store, seed=0, token_budget=96, packs_per_step=2)
    loader = Loader(store, plan, layer_ids=store.layer_ids, prefetch_bytes=10**6, num_threads=2, with_teacher=True)
    with loader:
        for batch in islice(loader, 4):
            for pack in batch.packs:
                assert pack.teacher is not None
                read = [store.read_teacher(sample) for sample in pack.samples]
                if pack.teacher.hidden is not None:
                    found = {"bits": pack.teacher.hidden.view(torch.int16).numpy().view(np.uint16)}
                else:
                    assert pack.teacher.topk_ids is not None and pack.teacher.topk_logprobs is not None
                    found = {"topk_ids": pack.teacher.topk_ids.numpy()}
                    found["topk_logprobs"] = pack.teacher.topk_logprobs.numpy()
                for name, values in found.items():
                    assert np.array_equal(values, np.concatenate([rows[name] for rows in read]))


@pytest.mark.parametrize("teacher", KINDS)
def test_a_run_towards_the_teacher_learns_and_resumes_bit_for_bit(teacher: str, tmp_path: Path) -> None:
    path = store_with(tmp_path, teacher).path
    run(settings(path, tmp_path / "whole", kl_weight=0.7))
    whole = losses(tmp_path / "whole")
    assert all(np.isfinite(loss) for _, loss, _ in whole)
    assert np.mean([loss for _, loss, _ in whole[-3:]]) < np.mean([loss for _, loss, _ in whole[:3]])
    run(settings(path, tmp_path / "cross", kl_weight=0.0))
    assert losses(tmp_path / "cross")[0] != whole[0]
    killed = settings(path, tmp_path / "torn", kl_weight=0.7)
    state = prepare(killed, lambda _: None)
    with state.open_loader() as loader:
        batch = next(loader)
        sums, _ = train_step(state, batch, lr=0.0, noise=0.0)
    assert sums.mean_loss == whole[0][1]
    run(settings(path, tmp_path / "again", kl_weight=0.7, checkpoint_every=5))
    assert losses(tmp_path / "again") == whole
    assert all(torch.equal(weights(tmp_path / "again")[name], w) for name, w in weights(tmp_path / "whole").items())


def test_the_whole_vocabulary_as_top_k_equals_the_last_hidden_state(tmp_path: Path) -> None:
    """Through the target's final norm and head, one is made from the other by hand."""
    hidden = store_with(tmp_path, "hidden")
    state = prepare(settings(hidden.path, tmp_path / "run", kl_weight=1.0), lambda _: None)
    with state.open_loader() as loader:
        batch = next(loader)
        expected, _ = train_step(state, batch, lr=0.0, noise=0.0)
    other = prepare(settings(hidden.path, tmp_path / "other", kl_weight=1.0), lambda _: None)
    norm = torch.from_numpy((hidden.target_array("final_norm").astype(np.uint32) << 16).view(np.float32))
    with other.open_loader() as loader:
        batch = next(loader)
        for pack in batch.packs:
            assert pack.teacher is not None and pack.teacher.hidden is not None
            rows = pack.teacher.hidden.double()
            normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5) * norm.double()
            logprobs = torch.log_softmax(normed @ other.head.weight.double().T, dim=-1)
            values, ids = logprobs.sort(dim=-1, descending=True)
            object.__setattr__(pack.teacher, "hidden", None)
            object.__setattr__(pack.teacher, "topk_ids", ids.int())
            object.__setattr__(pack.teacher, "topk_logprobs", values.float())
        found, _ = train_step(other, batch, lr=0.0, noise=0.0)
    assert found.mean_loss == pytest.approx(expected.mean_loss, rel=1e-4)


def test_a_store_without_a_teacher_is_refused(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", LENGTHS).path
    with pytest.raises(StoreError, match="nothing of the target's distribution") as caught:
        run(settings(path, tmp_path / "run", kl_weight=0.5))
    assert "--teacher hidden" in str(caught.value)


def test_top_k_is_refused_with_a_restricted_vocabulary(tmp_path: Path) -> None:
    path = store_with(tmp_path, "topk:5").path
    with pytest.raises(ConfigError, match="top-k"):
        run(settings(path, tmp_path / "run", kl_weight=0.5, loss_vocab="seen"))
