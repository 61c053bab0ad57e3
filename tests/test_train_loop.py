"""Training as a user meets it: it learns, resumes exactly, and refuses what does not fit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_tools.errors import CheckpointError, DflashError, StoreError
from cache_tools.reader import Store
from cache_tools.synthetic import make_store
from train import checkpoint as checkpoints
from train.config import TrainConfig
from train.loop import train, train_step
from train.metrics import read_metrics
from train.state import prepare
from train.summary import summarize

LENGTHS = random.Random(1).choices(range(8, 41), k=60)


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "s.zarr"
    make_store(path, LENGTHS)
    return path


def settings(store: Path, out: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "store": store, "out": out, "block_size": 4, "mask_token_id": 5, "num_draft_layers": 1, "token_budget": 96,
        "packs_per_step": 2, "anchors_per_step": 24, "steps": 12, "lr": 3e-3, "precision": "fp32", "device": "cpu",
        "threads": 1, "log_every": 4, "checkpoint_every": 3,
    }  # fmt: skip
    return TrainConfig(**{**values, **changes})


def run(config: TrainConfig) -> list[str]:
    lines: list[str] = []
    train(config, say=lines.append)
    return lines


def losses(out: Path) -> list[tuple[float, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(out / "metrics.jsonl")]


def weights(out: Path) -> dict[str, torch.Tensor]:
    newest = checkpoints.latest(out)
    assert newest is not None
    return checkpoints.load(newest).weights


def test_loss_falls_far_below_chance_on_a_few_samples(tmp_path: Path) -> None:
    make_store(tmp_path / "s.zarr", [16] * 4)
    run(settings(tmp_path / "s.zarr", tmp_path / "run", steps=150, lr=1e-2, anchors_per_step=64, checkpoint_every=150))
    curve = [loss for _, loss, _ in losses(tmp_path / "run")]
    assert curve[0] > 3.5  # chance is log(64) = 4.16
    assert sum(curve[-10:]) / 10 < 1.5


def test_every_log_line_parses_and_the_last_step_is_logged(store_path: Path, tmp_path: Path) -> None:
    from test_train_metrics import LINE

    lines = [line for line in run(settings(store_path, tmp_path / "run", steps=10)) if line.startswith("[")]
    found = [LINE.fullmatch(line) for line in lines]
    assert [match and match[1] for match in found] == ["1", "4", "8", "10"]


def test_resuming_repeats_the_uninterrupted_curve_bit_for_bit(store_path: Path, tmp_path: Path) -> None:
    run(settings(store_path, tmp_path / "whole", noise_start=0.1))
    interrupted = settings(store_path, tmp_path / "parts", noise_start=0.1)

    def killer(line: str) -> None:
        if "step=8 " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(interrupted, say=killer)
    assert len(losses(tmp_path / "parts")) == 8
    lines = run(interrupted)
    assert any("resuming at step 6" in line for line in lines)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "parts")[name])


def test_kill_9_at_random_moments_gives_the_uninterrupted_curve(store_path: Path, tmp_path: Path) -> None:
    steps, rng = 60, random.Random(3)
    changes = {"steps": steps, "checkpoint_every": 5}
    run(settings(store_path, tmp_path / "whole", **changes))
    code = (
        "import sys; from pathlib import Path; from test_train_loop import settings, run; "
        f"run(settings(Path({str(store_path)!r}), Path({str(tmp_path / 'killed')!r}), **{changes!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent)}
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for kill_at in (*sorted(rng.sample(range(2, steps - 2), 3)), None):
        process = subprocess.Popen([sys.executable, "-c", code], env=environment)
        while kill_at is not None and process.poll() is None:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= kill_at:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        assert process.wait() == (0 if kill_at is None else -signal.SIGKILL)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "killed")[name])


def test_a_finished_run_run_again_changes_nothing(store_path: Path, tmp_path: Path) -> None:
    config = settings(store_path, tmp_path / "run")
    run(config)
    before = losses(tmp_path / "run")
    run(config)
    assert losses(tmp_path / "run") == before
    assert summarize(tmp_path / "run")["steps"] == 12


def test_resuming_reads_no_samples_for_a_scale_it_has(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(store_path, tmp_path / "run", steps=2)
    run(config)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("calibrated again")

    monkeypatch.setattr("train.state.channel_rms", never)
    run(config)


def test_zero_steps_write_the_untrained_drafter(store_path: Path, tmp_path: Path) -> None:
    config = settings(store_path, tmp_path / "run", steps=0)
    run(config)
    fresh = prepare(settings(store_path, tmp_path / "other", steps=1), lambda _: None).drafter.state_dict()
    for name, tensor in weights(tmp_path / "run").items():
        assert torch.equal(tensor, fresh[name])


@pytest.mark.parametrize(
    ("changes", "flag"), [({"seed": 1}, "--seed"), ({"lr": 1e-4}, "--lr"), ({"token_budget": 200}, "--token-budget")]
)
def test_changed_settings_are_refused_by_name(
    store_path: Path, tmp_path: Path, changes: dict[str, Any], flag: str
) -> None:
    config = settings(store_path, tmp_path / "run", steps=3)
    run(config)
    with pytest.raises(CheckpointError, match=flag):
        run(replace(config, **changes))


def test_another_store_under_the_same_path_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "s.zarr", LENGTHS)
    config = settings(tmp_path / "s.zarr", tmp_path / "run", steps=3)
    run(config)
    (tmp_path / "s.zarr").rename(tmp_path / "old.zarr")
    make_store(tmp_path / "s.zarr", LENGTHS[:-1])
    with pytest.raises(DflashError, match="store"):
        run(config)


def damage(store: Store, sample: int) -> None:
    """Flips a byte of one sample's hidden states, in the middle of its first chunk."""
    rows = store.manifest.layout.shard_rows
    path = store.path / "hidden" / "1" / "bits" / "c" / str(store.shard_of(sample)) / "0"
    content = bytearray(path.read_bytes())
    chunk = int(store.samples.start[sample]) % rows // store.manifest.layout.chunk_rows
    offset, size = struct.unpack_from("<QQ", content, len(content) - 4 - 16 * (rows // 8 - chunk))
    content[offset + size // 2] ^= 64
    path.write_bytes(content)


def test_unreadable_samples_are_left_out_counted_and_named_and_the_order_stays(
    store_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(store_path, tmp_path / "s.zarr")
    damage(Store.open(tmp_path / "s.zarr"), 30)
    whole = settings(store_path, tmp_path / "whole", steps=30)
    run(whole)
    damaged = replace(whole, store=tmp_path / "s.zarr", out=tmp_path / "damaged", max_unreadable=9)
    said = run(damaged)
    for line, sound in zip(*(read_metrics(config.out / "metrics.jsonl") for config in (damaged, whole)), strict=True):
        assert line["order_hash"] == sound["order_hash"]
        assert (line["slots"] < sound["slots"]) == (line["unreadable"] > 0)
    num_unreadable = summarize(damaged.out)["unreadable"]
    assert num_unreadable >= 2
    assert len([line for line in said if line.startswith("sample 30 is left out of step")]) == num_unreadable


def test_more_unreadable_samples_than_allowed_stop_the_run_and_the_count_survives_resumption(
    store_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(store_path, tmp_path / "s.zarr")
    damage(Store.open(tmp_path / "s.zarr"), 30)
    config = settings(tmp_path / "s.zarr", tmp_path / "run", steps=30, max_unreadable=1, checkpoint_every=1)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"(?s)too many samples.*samples \[30\].*got: 2\b.*--max-unreadable"):
            run(config)
    assert sum(line["unreadable"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1
    with pytest.raises(StoreError, match="sample 30"):
        run(replace(config, max_unreadable=0))


def test_an_incomplete_store_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "s.zarr", LENGTHS, shards=[0])
    with pytest.raises(StoreError, match="1 of 49 shards"):
        run(settings(tmp_path / "s.zarr", tmp_path / "run"))


def test_a_layer_the_store_lacks_is_refused_naming_both_lists(store_path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"(?s)\[1, 2\].*\[1, 3\]"):
        run(settings(store_path, tmp_path / "run", layer_ids=(1, 2)))


def test_any_subset_of_the_stored_layers_trains(store_path: Path, tmp_path: Path) -> None:
    run(settings(store_path, tmp_path / "run", steps=2, layer_ids=(3,)))
    assert weights(tmp_path / "run")["fc.weight"].shape == (16, 16)


def test_the_seen_vocabulary_equals_the_full_one_when_all_tokens_are_seen(tmp_path: Path) -> None:
    make_store(tmp_path / "s.zarr", [200] * 6)
    for vocab in ("full", "seen"):
        run(settings(tmp_path / "s.zarr", tmp_path / vocab, steps=4, token_budget=400, loss_vocab=vocab))
    full, seen = losses(tmp_path / "full"), losses(tmp_path / "seen")
    assert [loss for _, loss, _ in seen] == pytest.approx([loss for _, loss, _ in full], rel=1e-5)


@pytest.mark.parametrize("kind", ["decay", "uniform", "dpace"])
def test_step_loss_is_normalised_over_the_step_not_per_pack(store_path: Path, tmp_path: Path, kind: str) -> None:
    state = prepare(settings(store_path, tmp_path / "run", slot_weights=kind), lambda _: None)
    with state.open_loader() as loader:
        # The packs must differ for this test to mean anything.
        batch = next(b for b in loader if len({int(pack.loss_mask.sum()) for pack in b.packs}) == 2)
        sums, _ = train_step(state, batch, lr=0.0, noise=0.0)
        assert sums.mean_loss == pytest.approx(_dense_loss(state, batch), rel=1e-5)


def _dense_loss(state: Any, batch: Any) -> float:
    """Weighted cross entropy over all packs of the step, with all logits and no slices; whatever the weights, divided
    by their sum."""
    from train.anchors import block_targets, block_tokens, decay_weights, sample_anchors, streak_weights
    from train.attention import BlockLayout

    numerator = denominator = 0.0
    config = state.config
    for pack in batch.packs:
        chosen = sample_anchors(
            pack.loss_mask.numpy(), pack.cu_seqlens.numpy(), pack.samples, seed=config.seed, step=batch.step,
            anchors_per_supervised=config.anchors_per_step / batch.supervised,
        )  # fmt: skip
        anchors = torch.from_numpy(chosen)
        targets = block_targets(anchors, pack.input_ids, pack.loss_mask, pack.cu_seqlens, config.block_size)
        embeds = state.embed(block_tokens(anchors, pack.input_ids, config.block_size, config.mask_token_id))
        context = state.drafter.context(pack.tapped.to_features(state.device, torch.float32, state.feature_scale))
        hidden = state.drafter(embeds, context, BlockLayout(anchors, pack.cu_seqlens, config.block_size))
        nll = torch.nn.functional.cross_entropy(
            (hidden @ state.head.weight.T).flatten(0, 1), targets.labels.flatten(), reduction="none"
        )
        weight = {
            "uniform": targets.valid.float(),
            "decay": decay_weights(targets.valid, config.slot_gamma),
            "dpace": streak_weights(torch.exp(-nll).view(targets.valid.shape), targets.valid),
        }[config.slot_weights].flatten()
        numerator += float((nll.detach() * weight).sum())
        denominator += float(weight.sum())
    return numerator / denominator
