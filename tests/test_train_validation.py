"""Validation judges without disturbing training, repeats after a kill, and keeps the best checkpoint."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_train_distributed import arguments as rank_arguments
from test_train_distributed import run as run_ranks
from test_train_loop import LENGTHS, losses, run, settings, weights

from cache_tools.errors import CheckpointError, ConfigError
from cache_tools.reader import Store
from cache_tools.synthetic import make_store
from train import checkpoint as checkpoints
from train import held_out
from train.anchors import block_targets, decay_weights
from train.config import EvalConfig, TrainConfig
from train.held_out import group_samples, read_packs
from train.loading import drafter_of_run
from train.loop import train
from train.metrics import read_metrics
from train.selection import some_of, validation_samples
from train.state import prepare
from train.store_evaluation import evaluate_store
from train.summary import summarize
from train.validation import Validation

SHARE = 0.3


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("validation") / "s.zarr"
    make_store(path, LENGTHS)
    return path


def validated(store: Path, out: Path, **changes: Any) -> TrainConfig:
    return settings(store, out, **{"validation_share": SHARE, "lr": 1e-2, **changes})


def curve(out: Path) -> list[tuple[int, Any]]:
    return [(line["step"], line["validation"]) for line in read_metrics(out / "metrics.jsonl") if line["validation"]]


def test_it_comes_with_checkpoints_and_leaves_training_as_it_was(store_path: Path, tmp_path: Path) -> None:
    without = validated(store_path, tmp_path / "without", validate_every=0, steps=7)
    assert not any("validation" in line for line in run(without)) and curve(without.out) == []
    config = validated(store_path, tmp_path / "with", steps=7)
    said = [line for line in run(config) if line.startswith("validation at step")]
    assert [step for step, _ in curve(config.out)] == [3, 6, 7] and len(said) == 3
    assert losses(config.out) == losses(without.out)
    assert all(torch.equal(tensor, weights(without.out)[name]) for name, tensor in weights(config.out).items())


def test_a_new_run_in_the_folder_of_one_without_checkpoint_does_not_keep_its_best(
    store_path: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"validate_every": 1, "checkpoint_every": 100, "steps": 4}

    def killer(line: str) -> None:
        if "validation at step 3" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(validated(store_path, tmp_path, **changes), say=killer)
    assert checkpoints.best(tmp_path) is not None and checkpoints.latest(tmp_path) is None
    run(validated(store_path, tmp_path, **changes | {"validate_every": 0, "seed": 5}))
    assert checkpoints.best(tmp_path) is None


def test_resuming_repeats_validation_and_the_best_checkpoint_bit_for_bit(store_path: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"validate_every": 2, "checkpoint_every": 3, "steps": 12}
    whole = validated(store_path, tmp_path / "whole", **changes)
    run(whole)
    parts = validated(store_path, tmp_path / "parts", **changes)

    def killer(line: str) -> None:
        if "validation at step 8" in line:  # the newest checkpoint is that of step 6
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(parts, say=killer)
    run(parts)
    assert curve(parts.out) == curve(whole.out) and [step for step, _ in curve(whole.out)] == [2, 4, 6, 8, 10, 12]
    best = [checkpoints.best(config.out) for config in (whole, parts)]
    assert best[0] is not None and best[1] is not None and best[0].name == best[1].name
    one, other = (checkpoints.load(path) for path in best if path is not None)
    assert one.validation == other.validation
    assert all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


def test_the_best_checkpoint_is_the_first_with_the_highest_acceptance_length(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([1.5, None, 2.0, 1.9, 2.0, 1.2])
    measure = Validation._measure

    def scripted(self: Validation) -> dict[str, Any]:
        return {**measure(self), "acceptance_length": next(lengths)}

    monkeypatch.setattr(Validation, "_measure", scripted)
    config = validated(store_path, tmp_path / "run", validate_every=2, keep_checkpoints=1)
    kept: dict[int, Any] = {}

    def watch(line: str) -> None:
        if line.startswith("validation"):
            path = checkpoints.best(config.out)
            kept[int(line.split()[3].rstrip(":"))] = path and checkpoints.read_plain(path)["step"]

    train(config, say=watch)
    assert kept == {2: 2, 4: 2, 6: 6, 8: 6, 10: 6, 12: 6}
    assert sorted(path.name for path in (config.out / "checkpoints").iterdir()) == ["best-000000006", "step-000000012"]
    assert summarize(config.out)["best_validation"]["step"] == 6
    best = checkpoints.load(config.out / "checkpoints" / "best-000000006")
    assert best.optimizer == {} and best.validation["acceptance_length"] == 2.0


@pytest.mark.parametrize("layer_ids", [(1, 3), (3, 1)])
def test_evaluating_the_runs_own_held_out_samples_gives_the_logged_number(
    store_path: Path, tmp_path: Path, layer_ids: tuple[int, ...]
) -> None:
    """Also with a restricted softmax: validation decodes with the whole head, as evaluation does."""
    config = validated(
        store_path, tmp_path / "run", steps=40, checkpoint_every=40, loss_vocab="seen", layer_ids=layer_ids
    )
    run(config)
    [(_, logged)] = curve(config.out)
    report = evaluate_store(
        EvalConfig(store=store_path, drafter=config.out, max_new_tokens=10_000, device="cpu", threads=1)
    )
    assert report["held_out"] is True and report["selection"] == "held out by the run"
    assert report["num_samples"] == logged["num_samples"] == len(validation_samples(Store.open(store_path), SHARE))
    for name in ("acceptance_length", "acceptance_length_pooled", "num_answers"):
        assert report[name] == pytest.approx(logged[name])
    assert logged["acceptance_length"] > 1.0


def test_the_loss_is_the_weighted_mean_over_all_blocks_of_the_held_out_samples(
    store_path: Path, tmp_path: Path
) -> None:
    config = validated(store_path, tmp_path / "run", anchors_per_step=10_000)
    state = prepare(config, lambda _: None)
    metrics = Validation(state, lambda _: None)._measure()
    numerator = denominator = 0.0
    groups = group_samples(state.store, validation_samples(state.store, SHARE))
    for pack in read_packs(state.store, groups, state.layer_ids):
        bounds = pack.cu_seqlens.tolist()
        features = pack.tapped.to_features(state.device, torch.float32, state.feature_scale)
        for begin, end in itertools.pairwise(bounds):
            ids, mask = pack.input_ids[begin:end], pack.loss_mask[begin:end]
            for anchor in np.flatnonzero(mask[:-1] & mask[1:]).tolist():
                targets = block_targets(torch.tensor([anchor]), ids, mask, torch.tensor([0, end - begin]), 4)
                cache = state.drafter.new_cache()
                with torch.no_grad():
                    state.drafter.extend(cache, features[begin : begin + anchor])
                    block = torch.tensor([int(ids[anchor]), 5, 5, 5])
                    logits = state.drafter.draft_block(state.embed(block), cache) @ state.head.weight.T
                weight = decay_weights(targets.valid, config.slot_gamma)[0]
                nll = torch.nn.functional.cross_entropy(logits, targets.labels[0], reduction="none")
                numerator, denominator = numerator + float((nll * weight).sum()), denominator + float(weight.sum())
    assert metrics["loss"] == pytest.approx(numerator / denominator, rel=1e-5)


def test_of_a_run_that_averages_its_weights_the_average_is_judged(store_path: Path, tmp_path: Path) -> None:
    config = validated(store_path, tmp_path / "run", ema_decay=0.9, steps=6, checkpoint_every=6)
    run(config)
    [(_, logged)] = curve(config.out)
    newest = checkpoints.latest(config.out)
    assert newest is not None
    saved = checkpoints.load(newest)
    state = prepare(replace(config, out=tmp_path / "other", ema_decay=0.0), lambda _: None)
    judge = Validation(state, lambda _: None)
    losses_of = []
    for weights_of in (saved.average, saved.weights):
        state.drafter.load_state_dict(weights_of)
        losses_of.append(judge._measure()["loss"])
    assert logged["loss"] == losses_of[0] != losses_of[1]


def small_packs() -> None:
    patch("train.held_out.PACK_TOKENS", 60).start()


def test_several_ranks_log_the_same_numbers_as_one(store_path: Path, tmp_path: Path) -> None:
    """Packs are dealt out to ranks and added up in their own order."""
    flags = {"steps": 4, "validation_share": SHARE, "validate_every": 2}
    for world_size in (1, 2):
        out, sabotage = tmp_path / str(world_size), dict.fromkeys(range(world_size), small_packs)
        given = rank_arguments(store_path, out, **flags)
        assert run_ranks(world_size, given, tmp_path / f"logs{world_size}", sabotage=sabotage) == [0] * world_size
        best = checkpoints.best(out)
        assert best is not None
        assert [step for step, _ in curve(out)] == [2, 4]
        for (_, mine), (_, alone) in zip(curve(out), curve(tmp_path / "1"), strict=True):
            assert mine == pytest.approx(alone, rel=1e-5)


def test_the_samples_are_always_the_same_and_at_most_as_many_as_asked_for(store_path: Path, tmp_path: Path) -> None:
    config = validated(store_path, tmp_path / "run", validation_samples=5, seed=3)
    run(config)
    assert {found["num_samples"] for _, found in curve(config.out)} == {5}
    samples = validation_samples(Store.open(store_path), SHARE)
    assert some_of(samples, 5).tolist() == some_of(samples, 5).tolist() != samples[:5].tolist()
    assert set(some_of(samples, 5).tolist()) <= set(samples.tolist())
    with pytest.raises(CheckpointError, match="validation-samples"):
        run(replace(config, validation_samples=6))


def test_small_packs_hold_every_sample_once_those_with_most_to_walk_first(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, samples = Store.open(store_path), np.arange(1, 50)
    whole = evaluate_store(EvalConfig(store=store_path, drafter=exported(store_path), device="cpu", threads=1))
    monkeypatch.setattr(held_out, "PACK_TOKENS", 64)
    groups = group_samples(store, samples)
    assert sorted(np.concatenate(groups).tolist()) == samples.tolist()
    assert all(store.samples.length[group].sum() <= 64 for group in groups) and len(groups) > 10
    supervised = store.samples.supervised[np.concatenate(groups)]
    assert (np.diff(supervised) <= 0).all()
    for group, pack in zip(groups, read_packs(store, groups, (3, 1)), strict=True):
        assert pack.samples == tuple(group.tolist())
        states = np.concatenate([store.read_hidden(sample, (3, 1)) for sample in pack.samples])
        assert np.array_equal(pack.tapped.parts["bits"].transpose(0, 1).view(torch.uint16).numpy(), states)
        assert pack.input_ids.tolist() == [i for sample in pack.samples for i in store.read_tokens(sample)[0].tolist()]
    small = evaluate_store(EvalConfig(store=store_path, drafter=exported(store_path), device="cpu", threads=1))
    assert small["num_steps"] == whole["num_steps"] and small["by_position"] == whole["by_position"]


def exported(store: Path) -> Path:
    """An untrained exported drafter beside the store."""
    from train.export import export_drafter

    out = store.parent / "drafter"
    if not out.exists():
        export_drafter(prepare(settings(store, store.parent / "r"), lambda _: None).drafter, out)
    return out


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"validation_share": 1e-9}, "no sample is held out"), ({"validation_share": 0.0, "validate_every": 5}, "share")],
)
def test_validation_without_samples_is_refused(
    store_path: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(validated(store_path, tmp_path / "run", **changes))


def test_a_run_without_validation_has_no_best_checkpoint(store_path: Path, tmp_path: Path) -> None:
    config = settings(store_path, tmp_path / "run", steps=1)
    run(config)
    with pytest.raises(CheckpointError, match="no best checkpoint"):
        drafter_of_run(config.out, "best")
    assert json.loads((config.out / "metrics.jsonl").read_text())["validation"] is None
    assert summarize(config.out)["best_validation"] is None
