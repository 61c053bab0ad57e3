"""Repair: whatever was damaged, the store ends with the bytes it had; or nothing is touched and the error says why."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from precompute_cases import (
    SMALL_SHARD_BYTES,
    chats,
    directory_bytes,
    make_precompute_config,
    make_target,
    write_jsonl,
)
from repair_cases import Case, RejectsSome, damage, set_conditions

from cache_tools.errors import StoreError
from cache_tools.integrity import verify
from cache_tools.reader import Store
from precompute.cli import main
from precompute.config import PrecomputeConfig
from precompute.repair import repair
from precompute.run import run
from precompute.target import Target

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("repair")
    target = make_target(folder / "target", "qwen3")
    rows = [*chats(10), {"messages": "none"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("precompute.planning._MB", SMALL_SHARD_BYTES)
        patch.setattr("precompute.sink.find_bad_layer", RejectsSome())
        config = make_precompute_config(target, write_jsonl(folder / "rows.jsonl", rows), folder / "store")
        run(dataclasses.replace(config, on_bad="skip"))
    return Case(dataclasses.replace(config, on_bad="skip"), directory_bytes(folder / "store"))


@pytest.fixture(scope="module")
def quantised(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same in a quantised codec and with a teacher."""
    config = dataclasses.replace(case.config, codec="int4", teacher="topk:3", store=tmp_path_factory.mktemp("q") / "s")
    with pytest.MonkeyPatch.context() as patch:
        set_conditions(patch, case)
        run(config)
    return Case(config, directory_bytes(config.store or Path()))


@pytest.fixture(autouse=True)
def same_conditions(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    set_conditions(monkeypatch, case)


KINDS = {
    "hidden": "hidden/2/bits/c/1/0",
    "hidden metadata": "hidden/0/bits/zarr.json",
    "tokens": "tokens/input_ids/c/1",
    "mask": "tokens/loss_mask/c/0",
    "where samples lie": "samples/start/c/0",
    "names of samples": "samples/content_id/c/0/0",
    "group": "samples/zarr.json",
    "weights": "target/lm_head/bits/c/0/0",
    "weights' metadata": "target/embed_tokens/bits/zarr.json",
    "attributes of the target": "target/zarr.json",
    "tokenizer": "target/files/tokenizer.json",
    "skipped rows": "target/files/skipped.jsonl",
    "manifest": "zarr.json",
    "plan's seal": "sealed/plan.json",
    "target's seal": "sealed/target.json",
    "shard's seal": "sealed/1.json",
    "rejected": "rejected/0.json",
}


def test_the_kinds_are_all_that_a_store_has(case: Case) -> None:
    def kind(name: str) -> str:
        parts = ["N" if part.split(".")[0].isdigit() else part for part in name.split("/")]
        return "/".join(parts[:1] if parts[0] in ("target", "samples", "tokens") else parts)

    assert set(KINDS.values()) <= set(case.content)
    kinds = {kind(name) for name in KINDS.values()} | {"hidden/zarr.json", "hidden/N/zarr.json"}
    assert {kind(name) for name in case.content} - kinds == set()


@pytest.mark.parametrize("how", ["flip", "cut", "delete"])
@pytest.mark.parametrize("name", KINDS.values(), ids=KINDS)
def test_one_damaged_file_of_any_kind_gets_its_bytes_back(name: str, how: str, case: Case, tmp_path: Path) -> None:
    config = case.copy(tmp_path)
    damage(tmp_path / "store" / name, how, random.Random(name + how))
    summary = repair(config)
    assert directory_bytes(tmp_path / "store") == case.content
    assert verify(tmp_path / "store") == []
    assert summary.differing == []
    assert summary.run.complete
    if not name.startswith("sealed/"):
        assert summary.damaged == [name]
    is_hidden = name.startswith(("hidden/2", "rejected", "sealed/1"))
    assert summary.run.computed_shards == len(summary.shards) == int(is_hidden)
    assert summary.target == ((name.startswith("target/") and "/files/" not in name) or name == "sealed/target.json")


@pytest.mark.parametrize("how", ["flip", "delete"])
@pytest.mark.parametrize(
    ("name", "num_shards"),
    [
        ("hidden/0/codes/c/1/0", 1),
        ("hidden/2/group_scale/c/0/0", 1),
        ("hidden/2/token_scale/c/0", 1),
        ("hidden/0/first/c/2/0", 1),
        ("hidden/0/first/zarr.json", 0),
        ("hidden/2/channel_scale/c/0", 0),
        ("hidden/2/channel_scale/zarr.json", 0),
        ("sealed/scales.json", 0),
        ("last/topk_ids/c/1/0", 1),
        ("last/topk_logprobs/c/1/0", 1),
    ],
)
def test_files_of_quantised_states_and_of_the_teacher_get_their_bytes_back(
    name: str, num_shards: int, how: str, quantised: Case, tmp_path: Path
) -> None:
    config = quantised.copy(tmp_path)
    damage(tmp_path / "store" / name, how, random.Random(name))
    findings = verify(tmp_path / "store")
    assert {item.object for item in findings if item.kind in ("corrupt", "missing")} == {name}
    summary = repair(config)
    assert directory_bytes(tmp_path / "store") == quantised.content
    assert len(summary.shards) == num_shards
    assert summary.run.complete


def test_channel_scales_that_come_out_differently_are_refused_and_never_mixed_in(
    case: Case, quantised: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quantised.copy(tmp_path)
    monkeypatch.setattr("precompute.calibration._NUM_SAMPLES", 2)
    damage(tmp_path / "store/hidden/0/channel_scale/c/0", "flip", random.Random(0))
    damage(tmp_path / "store/hidden/0/codes/c/1/0", "flip", random.Random(0))
    with pytest.raises(StoreError, match="channel scales come out other than those"):
        repair(config)
    with pytest.raises(StoreError, match=r"not complete(.|\n)*channel scales missing"):
        Store.open(tmp_path / "store").require_complete()
    monkeypatch.undo()
    set_conditions(monkeypatch, case)
    repair(config)
    assert directory_bytes(tmp_path / "store") == quantised.content


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
def test_many_damaged_files_at_once_get_their_bytes_back(seed: int, case: Case, tmp_path: Path) -> None:
    config, chance = case.copy(tmp_path), random.Random(seed)
    witness = chance.choice(["zarr.json", "sealed/plan.json"])  # something must still say what the store was
    for name in case.content:
        if name != witness and chance.random() < 0.4:
            damage(tmp_path / "store" / name, chance.choice(["flip", "cut", "delete", "replace"]), chance)
    shutil.copy(case.store / "zarr.json", tmp_path / "store/hidden/.tmp-999999-zarr.json")
    assert verify(tmp_path / "store")
    repair(config)
    assert directory_bytes(tmp_path / "store") == case.content


def test_a_shard_of_another_store_is_found_and_computed_again(case: Case, tmp_path: Path) -> None:
    config = case.copy(tmp_path)
    target = make_target(tmp_path / "target", "qwen3", seed=1)
    run(dataclasses.replace(config, target=target, store=tmp_path / "other"))
    for name in ("sealed/2.json", "hidden/0/bits/c/2/0", "hidden/2/bits/c/2/0"):
        shutil.copy(tmp_path / "other" / name, tmp_path / "store" / name)
    (finding,) = verify(tmp_path / "store")
    assert (finding.kind, finding.object, finding.shard) == ("wrong seal", "sealed/2.json", 2)
    assert "other weights" in finding.detail
    assert repair(config).shards == [2]
    assert directory_bytes(tmp_path / "store") == case.content


def test_the_seal_of_a_shard_in_the_place_of_the_plans_is_not_taken_for_it(case: Case, tmp_path: Path) -> None:
    config = case.copy(tmp_path)
    shutil.copy(tmp_path / "store/sealed/1.json", tmp_path / "store/sealed/plan.json")
    assert repair(config).run.computed_shards == 0
    assert directory_bytes(tmp_path / "store") == case.content


def test_an_undamaged_store_stays_as_it_is_and_foreign_files_stay_too(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", never)
    config = case.copy(tmp_path)
    (tmp_path / "store/notes.txt").write_bytes(b"mine")
    summary = repair(config)
    assert (summary.damaged, summary.foreign, summary.shards) == ([], ["notes.txt"], [])
    assert directory_bytes(tmp_path / "store") == {**case.content, "notes.txt": b"mine"}


def refused(config: PrecomputeConfig) -> str:
    """The error of a repair that must not touch anything."""
    assert config.store is not None
    before = directory_bytes(config.store)
    with pytest.raises(StoreError) as caught:
        repair(config)
    assert directory_bytes(config.store) == before
    assert [item.name for item in config.store.parent.iterdir() if item.name.startswith(".tmp-")] == []
    return str(caught.value)


def test_other_settings_data_or_weights_are_refused_before_anything_is_taken_out(case: Case, tmp_path: Path) -> None:
    config = case.copy(tmp_path)
    other_target = make_target(tmp_path / "target", "qwen3", seed=1)
    other_data = write_jsonl(tmp_path / "rows.jsonl", chats(9))
    for name in ("hidden/0/bits/c/0/0", "tokens/input_ids/c/0"):
        damage(tmp_path / "store" / name, "flip", random.Random(0))
        assert "data.settings.max_length: 256 in the store" in refused(dataclasses.replace(config, max_length=255))
        assert "data.sources.0.sha256" in refused(dataclasses.replace(config, data=(other_data,)))
        shutil.copy(case.store / name, tmp_path / "store" / name)
    damage(tmp_path / "store/hidden/0/bits/c/0/0", "delete", random.Random(0))
    assert "target.weights_sha256" in refused(dataclasses.replace(config, target=other_target))
    assert "engine.batch_tokens" in refused(dataclasses.replace(config, batch_tokens=128))


def test_without_manifest_or_plan_the_seals_must_agree_with_what_is_planned_again(case: Case, tmp_path: Path) -> None:
    config = case.copy(tmp_path)
    damage(tmp_path / "store/zarr.json", "delete", random.Random(0))
    assert "other weights or by another engine" in refused(dataclasses.replace(config, batch_tokens=128))
    assert "no longer gives what was planned" in refused(dataclasses.replace(config, max_length=100))
    damage(tmp_path / "store/sealed/plan.json", "cut", random.Random(0))
    assert "seals of another plan" in refused(dataclasses.replace(config, max_length=100))
    kept = case.copy(tmp_path / "kept")
    for name in ("zarr.json", "sealed/plan.json"):
        (tmp_path / "kept/store" / name).unlink()
    repair(kept)
    assert directory_bytes(tmp_path / "kept/store") == case.content
    for seal in (tmp_path / "store/sealed").iterdir():
        seal.write_bytes(b"")
    assert "no intact seal" in refused(config)


def test_a_tokenizer_that_gives_other_tokens_now_is_refused(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precompute import tokenizing

    config = case.copy(tmp_path)
    damage(tmp_path / "store/tokens/loss_mask/c/1", "flip", random.Random(0))
    original = tokenizing.RowTokenizer.tokenize

    def changed(self: Any, rows: Any) -> Any:
        results = list(original(self, rows))
        for result in results:
            if isinstance(result, tokenizing.Tokens):
                result.input_ids[1] += 1
                print("CHANGED", result.input_ids[:3])
        return results

    monkeypatch.setattr(tokenizing.RowTokenizer, "tokenize", changed)
    assert "would be different, first samples/content_id" in refused(config)


def test_shards_that_come_out_with_other_bits_are_named(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = case.copy(tmp_path)
    damage(tmp_path / "store/hidden/0/bits/c/1/0", "cut", random.Random(0))
    original = Target.hidden_states

    @torch.inference_mode()
    def changed(self: Target, batch: Any) -> Any:
        return [layer * 2 for layer in original(self, batch)]

    monkeypatch.setattr(Target, "hidden_states", changed)
    summary = repair(config)
    assert (summary.shards, summary.differing) == ([1], [1])
    assert verify(tmp_path / "store") == []


def test_a_store_that_was_not_finished_is_repaired_and_finished(case: Case, tmp_path: Path) -> None:
    config = case.copy(tmp_path)
    (tmp_path / "store/sealed/1.json").unlink()
    damage(tmp_path / "store/hidden/2/bits/c/0/0", "flip", random.Random(0))
    assert repair(config).run.computed_shards == 2
    assert directory_bytes(tmp_path / "store") == case.content
    with pytest.raises(StoreError, match="no store to repair"):
        repair(dataclasses.replace(config, store=tmp_path / "none"))


KILLED_REPAIR = """
import os, signal, sys
sys.path[:0] = [{repository!r}, {tests!r}]
import precompute.planning, precompute.sink
from repair_cases import RejectsSome
precompute.planning._MB = {small}
precompute.sink.find_bad_layer = rejects = RejectsSome()
rejects.rows = {rows}
left = {steps}
def dying(real):
    def call(*arguments, **more):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **more)
    return call
for name in ("fsync", "rename", "unlink"):
    setattr(os, name, dying(getattr(os, name)))
from precompute.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("steps", [4, 60, *(pytest.param(s, marks=pytest.mark.slow) for s in range(7, 130, 9))])
def test_a_repair_killed_at_any_change_of_a_file_is_finished_by_the_next(
    steps: int, case: Case, tmp_path: Path
) -> None:
    config = case.copy(tmp_path)
    chance = random.Random(steps)
    for name in ("zarr.json", "hidden/0/bits/c/2/0", "tokens/input_ids/c/1", "target/lm_head/bits/c/0/0"):
        damage(tmp_path / "store" / name, chance.choice(["flip", "cut", "delete"]), chance)
    script = KILLED_REPAIR.format(
        repository=str(REPOSITORY),
        tests=str(REPOSITORY / "tests"),
        small=SMALL_SHARD_BYTES,
        rows=int(Store.open(case.store).samples.length[0]),
        steps=steps,
    )
    settings: dict[str, Any] = {
        "target": config.target,
        "data": config.data[0],
        "store": config.store,
        "layer-ids": "0,2",
    }
    settings |= {"chunk-rows": 8, "shard-mb": 1, "batch-tokens": 256, "max-length": 256, "device": "cpu", "threads": 1}
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-c", script, "repair", *arguments, "--on-bad", "skip"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    assert done.returncode == -signal.SIGKILL or steps > 60
    repair(config)
    assert directory_bytes(tmp_path / "store") == case.content
    assert [item.name for item in tmp_path.iterdir()] == ["store"]


def test_the_command_says_what_it_repaired_and_refuses_misuse(case: Case, tmp_path: Path) -> None:
    config = case.copy(tmp_path)
    damage(tmp_path / "store/hidden/0/bits/c/1/0", "cut", random.Random(0))
    damage(tmp_path / "store/samples/zarr.json", "cut", random.Random(0))
    command = ["repair", "--target", str(config.target), "--data", str(config.data[0]), "--layer-ids", "0,2"]
    command += ["--chunk-rows", "8", "--shard-mb", "1", "--batch-tokens", "256", "--max-length", "256"]
    command += ["--device", "cpu", "--threads", "1", "--on-bad", "skip"]
    assert CliRunner().invoke(main, command).exit_code == 2
    command += ["--store", str(tmp_path / "store")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "damaged      hidden/0/bits/c/1/0" in result.stdout
    assert "planned      1 files again" in result.stdout
    assert "shards       1 computed again" in result.stdout
    assert directory_bytes(tmp_path / "store") == case.content
    answer = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert answer["damaged"] == [] and answer["run"]["complete"] is True
