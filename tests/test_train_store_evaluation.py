"""Evaluation from a store: which samples, what is said about them, and the same number as decoding with the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from precompute_cases import VOCAB_SIZE, chat, make_target, write_jsonl
from test_train_loop import LENGTHS, run, settings

from cache_tools.errors import CheckpointError, ConfigError, StoreError
from cache_tools.reader import Store
from cache_tools.synthetic import make_store
from precompute.cli import main as precompute_main
from train import evaluate as with_target
from train.cli import main
from train.config import EvalConfig
from train.decoding import decode_plain
from train.evaluate import evaluate
from train.export import export_drafter
from train.loading import drafter_of_run, load_any_drafter
from train.selection import validation_samples
from train.store_evaluation import describe_store, evaluate_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, a run with and one without held-out samples, and an exported drafter."""
    folder = tmp_path_factory.mktemp("store_evaluation")
    make_store(folder / "s.zarr", LENGTHS, rejected=[7])
    run(settings(folder / "s.zarr", folder / "held", steps=6, validation_share=0.3, validate_every=2, lr=1e-2))
    run(settings(folder / "s.zarr", folder / "all", steps=1))
    export_drafter(drafter_of_run(folder / "held"), folder / "exported")
    return folder


def report_of(folder: Path, drafter: str, **changes: Any) -> dict[str, Any]:
    store = changes.pop("store", folder / "s.zarr")
    return evaluate_store(EvalConfig(store=store, drafter=folder / drafter, device="cpu", threads=1, **changes))


def test_it_takes_what_the_run_held_out_and_says_when_that_is_not_so(folder: Path, tmp_path: Path) -> None:
    apart = validation_samples(Store.open(folder / "s.zarr"), 0.3)
    assert 7 not in apart and len(apart) > 8
    cases: list[tuple[str, dict[str, Any], int, bool | None, str]] = [
        ("held", {}, len(apart), True, "held out by the run"),
        ("held", {"max_samples": 3}, 3, True, "held out by the run"),
        ("held", {"samples": (int(apart[0]), int(apart[1]))}, 2, True, "given samples"),
        ("held", {"samples": (int(apart[0]), next(i for i in range(9) if i not in apart))}, 2, False, "given samples"),
        ("all", {}, len(LENGTHS) - 1, False, "all of the store"),
        ("exported", {"max_samples": 4}, 4, None, "all of the store"),
    ]
    for drafter, changes, count, held_out, selection in cases:
        report = report_of(folder, drafter, **changes)
        assert (report["num_samples"], report["held_out"], report["selection"]) == (count, held_out, selection)
        text = describe_store(json.loads(json.dumps(report)))
        assert ("TRAINED ON" in text) == (held_out is False) and ("unknown" in text) == (held_out is None)
        assert "exact for answers that the target generated greedily" in text
    make_store(tmp_path / "other.zarr", LENGTHS[:9])
    assert report_of(folder, "held", store=tmp_path / "other.zarr")["held_out"] is None


def test_the_numbers_add_up(folder: Path) -> None:
    report = report_of(folder, "held", max_new_tokens=100)
    store = Store.open(folder / "s.zarr")
    supervised = int(store.samples.supervised[validation_samples(store, 0.3)].sum())
    # Synthetic samples have one answer each; its first token is made without the drafter.
    assert report["num_answers"] == report["num_samples"]
    assert report["num_tokens"] == supervised - report["num_answers"]
    assert report["acceptance_length_pooled"] == pytest.approx(report["num_tokens"] / report["num_steps"])
    first = report["by_position"][0]
    assert 0 < first["accepted"] == first["conditional"] < 1
    answers = report["answers"]
    assert [sum(a[name] for a in answers) for name in ("num_steps", "num_gained")] == [
        report["num_steps"],
        report["num_tokens"],
    ]
    gained = {a["sample"]: a["num_gained"] for a in answers}
    assert gained == {int(i): int(store.samples.supervised[i]) - 1 for i in validation_samples(store, 0.3)}
    mean = sum(a["num_gained"] / a["num_steps"] for a in answers) / len(answers)
    assert report["acceptance_length"] == pytest.approx(mean)
    short = report_of(folder, "held", max_new_tokens=3)
    assert short["num_tokens"] == 2 * short["num_answers"]


def test_the_best_checkpoint_can_be_evaluated_and_exported(folder: Path, tmp_path: Path) -> None:
    plain = json.loads(next((folder / "held" / "checkpoints").glob("best-*/trainer.json")).read_text())
    report = report_of(folder, "held", checkpoint="best", max_new_tokens=10_000)
    assert report["acceptance_length"] == pytest.approx(plain["validation"]["acceptance_length"])
    given = ["export", "--run", str(folder / "held"), "--out", str(tmp_path / "d"), "--checkpoint", "best"]
    assert CliRunner().invoke(main, given).exit_code == 0
    best = drafter_of_run(folder / "held", "best").to(torch.bfloat16).state_dict()
    for name, tensor in load_any_drafter(tmp_path / "d").to(torch.bfloat16).state_dict().items():
        assert torch.equal(tensor, best[name])
    with pytest.raises(ConfigError, match="no checkpoints to choose from"):
        report_of(folder, "exported", checkpoint="best")


def test_what_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[7, 60\]"):
        report_of(folder, "held", samples=(7, 8, 60))
    make_store(tmp_path / "wide.zarr", LENGTHS[:5], hidden_size=32)
    with pytest.raises(CheckpointError, match="hidden_size 16 against 32"):
        report_of(folder, "held", store=tmp_path / "wide.zarr")
    make_store(tmp_path / "other.zarr", LENGTHS[:5], layer_ids=(1, 2))
    with pytest.raises(StoreError, match=r"(?s)\[1, 2\].*\[1, 3\]"):
        report_of(folder, "held", store=tmp_path / "other.zarr")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "neither"),
        ({"target": Path("t"), "store": Path("s")}, "both"),
        ({"target": Path("t")}, "no prompts"),
        ({"store": Path("s"), "prompts": (Path("p"),), "temperature": 1.0}, "--prompts, --temperature"),
        ({"store": Path("s"), "plain": False}, "--plain"),
        ({"target": Path("t"), "prompts": (Path("p"),), "max_samples": 3}, "--max-samples"),
        ({"target": Path("t"), "prompts": (Path("p"),), "temperature": -1.0}, "temperature"),
        ({"target": Path("t"), "prompts": (Path("p"),), "seed": 1}, "--seed 1"),
    ],
)
def test_settings_without_a_meaning_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EvalConfig(drafter=Path("d"), **settings)


NUM_PROMPTS, MAX_NEW_TOKENS = 8, 24


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a store of its own greedy answers, prompts for these, and a run that knows half of them."""
    folder = tmp_path_factory.mktemp("greedy")
    path = make_target(folder / "target", "qwen3")
    words = ["hello", "there", "good", "day", "to", "you", "how", "are"]
    rows = [chat(" ".join(words[n:] + words[:n]), "unused") for n in range(NUM_PROMPTS)]
    prompts = write_jsonl(folder / "prompts.jsonl", rows)
    target, tokenizer = with_target._load_target(path, torch.device("cpu"), torch.float32)
    config = EvalConfig(target=path, drafter=folder, prompts=(prompts,), max_new_tokens=MAX_NEW_TOKENS)
    answered = []
    for where, messages in with_target._rows(prompts, None):
        ids = with_target._prompt(where, messages, tokenizer, target, config)
        answer = decode_plain(target, ids, max_new_tokens=MAX_NEW_TOKENS, stop_ids=with_target._stop_ids(target)).tokens
        mask = [0] * len(ids) + [1] * len(answer)
        answered.append({"input_ids": [*ids.tolist(), *answer], "loss_mask": mask})
    data = write_jsonl(folder / "data.jsonl", answered)
    options = [
        "--target", path, "--data", data, "--store", folder / "s.zarr", "--layer-ids", "0,2", "--chunk-rows", 8,
        "--shard-mb", 1, "--batch-tokens", 256, "--max-length", 256, "--device", "cpu", "--threads", 1,
        "--dtype", "float32",
    ]  # fmt: skip
    for command in ("plan", "run"):
        result = CliRunner().invoke(precompute_main, [command, *map(str, options)])
        assert result.exit_code == 0, result.output
    run(
        settings(
            folder / "s.zarr", folder / "run", mask_token_id=VOCAB_SIZE - 1, token_budget=256, steps=160, lr=1e-2,
            anchors_per_step=64, packs_per_step=1, checkpoint_every=160,
        )
    )  # fmt: skip
    return folder


def test_both_ways_to_evaluate_agree_on_answers_that_the_target_generated_greedily(greedy: Path) -> None:
    """The only difference is the store's bfloat16: features are rounded, here without another choice of the drafter."""
    common: dict[str, Any] = {
        "drafter": greedy / "run",
        "max_new_tokens": MAX_NEW_TOKENS,
        "device": "cpu",
        "threads": 1,
    }
    decoded = evaluate(EvalConfig(target=greedy / "target", prompts=(greedy / "prompts.jsonl",), **common))
    stored = evaluate_store(EvalConfig(store=greedy / "s.zarr", **common))
    assert decoded["identical"] == stored["num_answers"] == NUM_PROMPTS
    assert decoded["acceptance_length"] > 1.3, "needs a drafter that is right now and then"
    for name in ("acceptance_length", "acceptance_length_pooled"):
        assert stored[name] == pytest.approx(decoded[name], rel=0.02)
    by_row = stored_answers(Store.open(greedy / "s.zarr"), stored)
    answers = decoded["files"][0]["answers"]
    assert sorted(by_row) == list(range(NUM_PROMPTS)) and len(answers) == NUM_PROMPTS
    assert [by_row[row]["num_gained"] for row in range(NUM_PROMPTS)] == [answer["num_gained"] for answer in answers]


def stored_answers(store: Store, report: dict[str, Any]) -> dict[int, dict[str, int]]:
    """The answers of a report by the row of the data that each came from: a store has an order of its own."""
    return {int(store.samples.row[answer["sample"]]): answer for answer in report["answers"]}


def test_several_files_are_reported_one_by_one_and_together_also_when_drawn(greedy: Path) -> None:
    lines = (greedy / "prompts.jsonl").read_text().splitlines()
    files = []
    for name, part in (("a.jsonl", lines[:1]), ("b.jsonl", lines[1:4])):
        (greedy / name).write_text("\n".join(part))
        files.append(greedy / name)
    common: dict[str, Any] = {
        "target": greedy / "target", "drafter": greedy / "run", "max_new_tokens": 8, "device": "cpu", "threads": 1,
    }  # fmt: skip
    for temperature in (0.0, 0.8):
        report = evaluate(EvalConfig(prompts=tuple(files), temperature=temperature, **common))
        assert [part["num_prompts"] for part in report["files"]] == [1, 3] and report["num_prompts"] == 4
        assert sum(part["num_tokens"] for part in report["files"]) == report["num_tokens"]
        for part in report["files"]:
            gained = [answer["num_gained"] for answer in part["answers"]]
            assert len(gained) == part["num_prompts"] and sum(gained) == part["num_tokens"] - part["num_prompts"]
            lengths = [answer["num_gained"] / answer["num_steps"] for answer in part["answers"]]
            assert part["acceptance_length"] == pytest.approx(sum(lengths) / len(lengths))
        mean = sum(part["acceptance_length"] * part["num_prompts"] for part in report["files"]) / 4
        assert report["acceptance_length"] == pytest.approx(mean)
        text = with_target.describe(json.loads(json.dumps(report)))
        assert all(f"{path}: " in text for path in files)
        assert (report["identical"] is None) == ("identical" not in text) == (temperature > 0)
        assert ("temperature 0.8" in text) == (temperature > 0)
    again = evaluate(EvalConfig(prompts=tuple(files), temperature=0.8, **common))
    other = evaluate(EvalConfig(prompts=tuple(files), temperature=0.8, seed=1, **common))
    assert again["by_position"] == report["by_position"] and again["num_tokens"] == report["num_tokens"]
    assert other["by_position"] != report["by_position"]


def test_the_command_prints_either_report(greedy: Path) -> None:
    common = ["eval", "--drafter", str(greedy / "run"), "--max-new-tokens", "6", "--device", "cpu"]
    result = CliRunner().invoke(main, [*common, "--store", str(greedy / "s.zarr"), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["num_answers"] == NUM_PROMPTS
    result = CliRunner().invoke(main, [*common, "--store", str(greedy / "s.zarr")])
    assert result.exit_code == 0 and "TRAINED ON" in result.stdout
    result = CliRunner().invoke(main, common)
    assert result.exit_code == 2 and "--store STORE" in result.stderr
