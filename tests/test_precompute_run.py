"""Whole runs: the bytes stored, resuming, several workers, and every refusal."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from precompute_cases import (
    CHATML,
    Kind,
    chats,
    directory_bytes,
    make_precompute_config,
    make_target,
    make_tokenizer,
    write_jsonl,
)
from transformers import AutoModelForCausalLM

from cache_tools.errors import ConfigError, StoreError, TargetError
from cache_tools.integrity import verify
from cache_tools.reader import Store
from cache_tools.writer import ShardWriter
from precompute.batching import plan_batches
from precompute.cli import main
from precompute.config import PrecomputeConfig
from precompute.locking import store_lock
from precompute.planning import plan
from precompute.run import run, write_plan
from precompute.target import Target

DiskUsage = namedtuple("DiskUsage", "total used free")

pytestmark = pytest.mark.usefixtures("small_shards")


@pytest.fixture
def planned(target: Path, data: Path, tmp_path: Path) -> PrecomputeConfig:
    """Settings of a store that is planned and has several shards, none of them computed."""
    config = make_precompute_config(target, data, tmp_path / "store")
    write_plan(plan(config), tmp_path / "store")
    assert Store.open(tmp_path / "store").num_shards > 5
    return config


def store_of(config: PrecomputeConfig) -> Store:
    assert config.store is not None
    return Store.open(config.store)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "hybrid"])
@torch.inference_mode()
def test_stored_states_are_transformers_hidden_states_bit_for_bit(kind: Kind, data: Path, tmp_path: Path) -> None:
    folder = make_target(tmp_path / "target", kind)
    config = make_precompute_config(folder, data, tmp_path / "store", limit=12)
    summary = run(config)
    assert summary.complete
    assert summary.computed_tokens == summary.tokens
    assert verify(tmp_path / "store") == []
    store = store_of(config)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for shard in range(store.num_shards):
        samples = store.shard_samples(shard)
        lengths = store.samples.length[samples.start : samples.stop].tolist()
        for batch in plan_batches(lengths, config.batch_tokens):
            rows = [torch.from_numpy(store.read_tokens(samples[i])[0].astype(np.int64)) for i in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            hidden = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
            for position, i in enumerate(batch):
                stored = store.read_hidden(samples[i])
                for column, layer_id in enumerate(store.layer_ids):
                    expected = hidden[layer_id + 1][position, : lengths[i]].view(torch.int16).numpy().view(np.uint16)
                    np.testing.assert_array_equal(stored[:, column], expected)
    np.testing.assert_array_equal(
        store.target_array("embed_tokens"),
        model.get_input_embeddings().weight.view(torch.int16).numpy().view(np.uint16),
    )
    assert store.target_attributes.norm_kind == ("one_plus_weight" if kind == "hybrid" else "plain")
    assert (store.target_file("tokenizer.json")).read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_second_run_computes_nothing_and_changes_nothing(
    planned: PrecomputeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(planned)
    before = directory_bytes(store_of(planned).path)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", never)
    assert run(planned).computed_tokens == 0
    assert directory_bytes(store_of(planned).path) == before


def test_planning_first_or_as_part_of_the_run_gives_the_same_bytes(
    planned: PrecomputeConfig, target: Path, data: Path, tmp_path: Path
) -> None:
    run(planned)
    run(make_precompute_config(target, data, tmp_path / "other"))
    assert directory_bytes(tmp_path / "store") == directory_bytes(tmp_path / "other")


def test_only_unsealed_shards_are_computed_again(planned: PrecomputeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run(planned)
    store = store_of(planned)
    complete = directory_bytes(store.path)
    for shard in (1, 4):
        (store.path / "sealed" / f"{shard}.json").unlink()
    (store.path / "hidden" / "0" / "bits" / "c" / "4" / "0").write_bytes(b"torn")
    (store.path / "hidden" / "0" / "bits" / "c" / "1" / ".tmp-99-0").write_bytes(b"left over")
    seen: list[int] = []
    original = Target.hidden_states

    def counted(self: Target, batch: Any) -> Any:
        seen.extend(len(ids) for ids in batch)
        return original(self, batch)

    monkeypatch.setattr(Target, "hidden_states", counted)
    summary = run(planned)
    expected = [int(store.samples.length[s]) for shard in (1, 4) for s in store.shard_samples(shard)]
    assert sorted(seen) == sorted(expected)
    assert (summary.computed_shards, summary.computed_tokens) == (2, sum(expected))
    assert directory_bytes(store.path) == complete


def test_two_workers_write_the_same_bytes_as_one(planned: PrecomputeConfig, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "store", tmp_path / "two")
    run(planned)
    settings = {field: getattr(planned, field) for field in planned.__dataclass_fields__}
    summary = run(PrecomputeConfig(**{**settings, "store": tmp_path / "two", "workers": 2, "threads": 2}))
    assert summary.complete
    assert directory_bytes(tmp_path / "two") == directory_bytes(tmp_path / "store")


def test_a_failing_worker_is_reported_and_ends_the_run(planned: PrecomputeConfig, tmp_path: Path) -> None:
    broken = make_target(tmp_path / "broken")
    poison(broken, "model.layers.2.mlp.down_proj.weight", float("nan"))
    settings = {field: getattr(planned, field) for field in planned.__dataclass_fields__}
    config = PrecomputeConfig(**{**settings, "target": broken, "store": tmp_path / "s", "workers": 2})
    with pytest.raises(TargetError, match="layer 2: NaN or Inf at token 0"):
        run(config)
    assert multiprocessing.active_children() == []
    assert not store_of(config).sealed


def poison(folder: Path, name: str, value: float) -> None:
    """Overwrites one weight of a saved target."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights[name].fill_(value)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda hidden: hidden[5].fill_(float("nan")), "NaN or Inf at token"),
        (lambda hidden: hidden[5:6, 3].fill_(float("inf")), "NaN or Inf at token"),
        (lambda hidden: hidden.zero_(), "all zero"),
        (lambda hidden: hidden.copy_(hidden[:1].expand_as(hidden)), "constant"),
    ],
)
def test_unusable_states_fail_by_sample_source_row_and_layer_or_are_skipped_and_listed(
    change: Any, reason: str, planned: PrecomputeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Target.hidden_states
    victim = store_of(planned).shard_samples(2)[0]
    tokens = store_of(planned).read_tokens(victim)[0]

    def damaged(self: Target, batch: Any) -> Any:
        layers = original(self, batch)
        first = 0
        for ids in batch:
            if np.array_equal(ids, tokens):
                with torch.inference_mode():
                    change(layers[1][first : first + len(ids)])
            first += len(ids)
        return layers

    monkeypatch.setattr(Target, "hidden_states", damaged)
    row = int(store_of(planned).samples.row[victim])
    with pytest.raises(TargetError, match=f"sample {victim}, layer 2: {reason}") as caught:
        run(planned)
    assert f"rows.jsonl:{row + 1}" in str(caught.value)
    assert store_of(planned).sealed == {0, 1}

    settings = {field: getattr(planned, field) for field in planned.__dataclass_fields__}
    summary = run(PrecomputeConfig(**{**settings, "on_bad": "skip"}))
    assert summary.rejected == 1
    store = store_of(planned)
    assert store.rejected == {victim}
    assert store.rejections[victim].layer == 2
    assert store.complete
    assert verify(store.path) == []


def test_a_sample_of_one_token_again_and_again_may_have_equal_states(target: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": [7] * 12, "loss_mask": [1] * 12}, *chats(2)]
    config = make_precompute_config(target, write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "store")
    run(config)
    store = store_of(config)
    (repeated,) = (s for s in range(store.num_samples) if set(store.read_tokens(s)[0].tolist()) == {7})
    states = store.read_hidden(repeated)
    assert (states == states[:1]).all()
    assert store.rejected == frozenset()


def test_a_changed_file_of_the_target_or_the_data_is_refused_by_field(
    planned: PrecomputeConfig, data: Path, tmp_path: Path
) -> None:
    run(planned)
    settings = {field: getattr(planned, field) for field in planned.__dataclass_fields__}

    def refused(**changes: Any) -> str:
        with pytest.raises(StoreError) as caught:
            run(PrecomputeConfig(**{**settings, **changes}))
        return str(caught.value.got)

    def copied(name: str) -> Path:
        return Path(shutil.copytree(planned.target, tmp_path / name))

    weights = copied("weights")
    poison(weights, "model.norm.weight", 1.5)
    assert refused(target=weights).startswith("target.weights_sha256: ")

    config = copied("config")
    value = json.loads((config / "config.json").read_text())
    (config / "config.json").write_text(json.dumps({**value, "rms_norm_eps": 0.1}))
    assert refused(target=config).startswith("target.config_sha256: ")

    tokenizer = copied("tokenizer")
    (tokenizer / "tokenizer.json").write_text((tokenizer / "tokenizer.json").read_text() + "\n")
    assert refused(target=tokenizer).startswith("tokenizer_sha256: ")

    template = copied("template")
    make_tokenizer(CHATML + " ").save_pretrained(template)
    assert refused(target=template).startswith("template_sha256: ")

    changed = tmp_path / "rows.jsonl"
    changed.write_bytes(data.read_bytes()[::-1])
    assert refused(data=(changed,)).startswith("data.sources.0.sha256: ")
    assert "data.sources.1.name" in refused(data=(data, data))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_ids": (0, 1)}, "layer_ids"),
        ({"codec": "raw"}, "codec"),
        ({"chunk_rows": 16}, "layout.chunk_rows"),
        ({"dtype": "float32"}, "target.dtype"),
        ({"max_length": 200}, "data.settings.max_length"),
        ({"loss_on": "all"}, "data.settings.loss_on"),
        ({"limit": 5}, "data.settings.limit"),
        ({"min_supervised": 3}, "data.settings.min_supervised"),
        ({"template_args": ("x=1",)}, "data.settings.template_args"),
        ({"shard_mb": 2}, "data.settings.shard_mb"),
        ({"batch_tokens": 128}, "engine.batch_tokens"),
        ({"attention": "eager"}, "engine.attention"),
    ],
)
def test_a_changed_setting_is_refused_by_field_with_both_values(
    changes: dict[str, Any], field: str, target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = tmp_path_factory.getbasetemp() / "settings-store"
    if not store.exists():
        run(make_precompute_config(target, data, store))
    with pytest.raises(StoreError) as caught:
        run(make_precompute_config(target, data, store, **changes))
    assert [part.split(":")[0] for part in str(caught.value.got).split("; ")] == [field]


def test_an_attempt_that_computed_nothing_binds_nobody_to_its_batch_size(
    planned: PrecomputeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("too large")

    with monkeypatch.context() as patch:
        patch.setattr("precompute.worker._store_parts", out_of_memory)
        with pytest.raises(TargetError, match="smaller --batch-tokens than 256"):
            run(planned)
    settings = {field: getattr(planned, field) for field in planned.__dataclass_fields__}
    assert run(PrecomputeConfig(**{**settings, "batch_tokens": 128})).complete


def test_a_second_command_on_the_same_store_is_refused(
    planned: PrecomputeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_tools.locking._PATIENCE_SECONDS", 0.0)
    with store_lock(store_of(planned).path), pytest.raises(StoreError, match="another command"):
        run(planned)
    assert run(planned).complete


def test_a_folder_that_is_no_store_is_left_alone(target: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with pytest.raises(StoreError):
        run(make_precompute_config(target, data, tmp_path / "store"))
    assert list((tmp_path / "store").iterdir()) == []


def test_a_disk_that_is_too_small_for_the_rest_is_refused(
    planned: PrecomputeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(10**6, 10**6, 0))
    with pytest.raises(StoreError, match="disk is too small"):
        run(planned)


def test_run_without_weights_or_with_impossible_workers_is_refused(data: Path, tmp_path: Path) -> None:
    bare = make_target(tmp_path / "bare", weights=False)
    with pytest.raises(TargetError, match="no weights"):
        run(make_precompute_config(bare, data, tmp_path / "store"))
    with pytest.raises(ConfigError, match="--store"):
        run(make_precompute_config(bare, data))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="CUDA"):
            run(make_precompute_config(bare, data, tmp_path / "store", device="cuda"))


def test_the_run_command_prints_its_summary_and_reports_errors_without_a_traceback(
    target: Path, data: Path, tmp_path: Path
) -> None:
    command = ["run", "--target", str(target), "--data", str(data), "--layer-ids", "0,2", "--device", "cpu"]
    command += ["--max-length", "256", "--limit", "3", "--threads", "1"]
    result = CliRunner().invoke(main, [*command, "--store", str(tmp_path / "s"), "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["complete"] is True
    assert summary["samples"] == 3
    assert summary["ratio"] == pytest.approx(2 * 32 * 2 / summary["bytes_per_token"], rel=1e-2)
    text = CliRunner().invoke(main, [*command, "--store", str(tmp_path / "s")])
    assert "Ktok/s" in text.stdout
    refused = CliRunner().invoke(main, [*command, "--store", str(tmp_path / "s"), "--codec", "raw"])
    assert refused.exit_code == 1
    assert "codec: 'bf16' in the store, 'raw' now" in refused.stderr
    assert CliRunner().invoke(main, command).exit_code == 2


def test_a_store_without_any_usable_sample_is_an_error_also_when_run_again(
    planned: PrecomputeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precompute.sink.find_bad_layer", lambda _: "all zero")
    config = dataclasses.replace(planned, on_bad="skip")
    for _ in range(2):
        with pytest.raises(TargetError, match=r"every sample was rejected(.|\n)*layer 0: all zero"):
            run(config)


def test_a_full_disk_in_the_first_batch_of_a_shard_leaves_no_half_written_file(
    planned: PrecomputeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreError("cannot write to the store")

    monkeypatch.setattr(ShardWriter, "append", full)
    before = directory_bytes(store_of(planned).path).keys()
    with pytest.raises(StoreError, match="cannot write"):
        run(planned)
    after = directory_bytes(store_of(planned).path).keys()
    assert [name for name in after - before if ".tmp-" in name] == []
