"""The commands one after another as a user runs them, on a dense and on a hybrid target with random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from precompute_cases import VOCAB_SIZE, Kind, chats, make_target, write_jsonl
from safetensors.torch import load_file
from test_train_metrics import LINE
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from cache_tools.cli import main as cache_main
from cache_tools.reader import Store
from precompute.cli import main as precompute_main
from train.cli import main as train_main
from train.drafter import DFlashDrafter
from train.evaluate import target_parts
from train.export import load_drafter
from train.target_state import TargetState

MASK, LAYER_IDS, BLOCK_SIZE, STEPS = VOCAB_SIZE - 1, (0, 2), 4, 6
NUM_PROMPTS = 3


@dataclass(frozen=True)
class Pipeline:
    """What the commands left on disk and said."""

    target: Path
    store: Path
    run: Path
    exported: Path
    prompts: Path
    plan_report: dict[str, Any]
    run_summary: dict[str, Any]
    console: str


def call(command: click.Command, *arguments: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exit_code == exit_code, result.output
    return result


def call_json(command: click.Command, *arguments: object) -> dict[str, Any]:
    """What a command prints on standard output, which must be JSON and nothing else."""
    found: dict[str, Any] = json.loads(call(command, *arguments, "--json").stdout)
    return found


def train_arguments(store: Path, out: Path, **changes: object) -> Sequence[str]:
    settings: dict[str, object] = {
        "store": store, "out": out, "block-size": BLOCK_SIZE, "num-draft-layers": 1, "mask-token-id": MASK,
        "token-budget": 256, "packs-per-step": 1, "anchors-per-step": 48, "steps": STEPS, "lr": 3e-3,
        "precision": "fp32", "device": "cpu", "threads": 1, "log-every": 2, "checkpoint-every": 3,
    }  # fmt: skip
    return ["run", *(str(part) for name, value in (settings | changes).items() for part in (f"--{name}", value))]


@pytest.fixture(scope="module", params=["qwen3", "hybrid"])
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Plan, compute, train and export."""
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    target = make_target(folder / "target", kind)
    data = write_jsonl(folder / "data.jsonl", chats(24))
    prompts = write_jsonl(folder / "prompts.jsonl", chats(NUM_PROMPTS))
    store, run, exported = folder / "s.zarr", folder / "run", folder / "exported"
    options = (
        "--target", target, "--data", data, "--store", store, "--layer-ids", "0,2", "--chunk-rows", 8, "--shard-mb", 1,
        "--batch-tokens", 256, "--max-length", 256, "--device", "cpu", "--threads", 1,
    )  # fmt: skip
    plan_report = call_json(precompute_main, "plan", *options)
    run_summary = call_json(precompute_main, "run", *options)
    console = call(train_main, *train_arguments(store, run)).stdout
    call(train_main, "export", "--run", run, "--out", exported)
    return Pipeline(target, store, run, exported, prompts, plan_report, run_summary, console)


def load_target(pipeline: Pipeline) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(pipeline.target, dtype=torch.bfloat16).eval()


def test_the_hybrid_target_has_both_kinds_of_layers(pipeline: Pipeline) -> None:
    config = json.loads((pipeline.target / "config.json").read_text())
    if config["model_type"] == "qwen3_5_text":
        assert set(config["layer_types"]) == {"linear_attention", "full_attention"}


def test_plan_and_run_report_the_same_store_as_info(pipeline: Pipeline) -> None:
    info = call_json(cache_main, "info", pipeline.store)
    assert info["complete"] and info["shards"]["sealed"] == info["shards"]["total"] >= 1
    assert info["num_samples"] == pipeline.plan_report["samples"] == pipeline.run_summary["samples"] == 24
    assert info["num_tokens"] == pipeline.plan_report["tokens"] == pipeline.run_summary["computed_tokens"]
    assert info["layer_ids"] == list(LAYER_IDS) and info["hidden_size"] == 32 and info["codec"] == "bf16"


def test_verify_finds_nothing_in_a_sound_store_and_exits_1_for_a_flipped_byte(pipeline: Pipeline) -> None:
    assert call_json(cache_main, "verify", pipeline.store) == {"ok": True, "findings": []}
    shard = next(path for path in sorted((pipeline.store / "hidden").rglob("c/0/*")) if path.is_file())
    original = shard.read_bytes()
    damaged = bytearray(original)
    damaged[len(damaged) // 3] ^= 1
    shard.write_bytes(damaged)
    try:
        report = json.loads(call(cache_main, "verify", pipeline.store, "--json", exit_code=1).stdout)
    finally:
        shard.write_bytes(original)
    assert not report["ok"] and report["findings"]


def test_training_prints_lines_that_scripts_can_parse(pipeline: Pipeline) -> None:
    lines = [line for line in pipeline.console.splitlines() if line.startswith("[")]
    found = [LINE.fullmatch(line) for line in lines]
    assert [match and match[1] for match in found] == ["1", "2", "4", "6"]
    assert pipeline.console.splitlines()[-1].startswith(f"done: {STEPS} steps, loss ")


def test_the_export_has_the_tensors_and_keys_of_the_format(pipeline: Pipeline) -> None:
    config = json.loads((pipeline.exported / "config.json").read_text())
    target = json.loads((pipeline.target / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": list(LAYER_IDS)}
    assert (config["block_size"], config["num_hidden_layers"], config["num_target_layers"]) == (BLOCK_SIZE, 1, 4)
    assert (config["hidden_size"], config["vocab_size"]) == (target["hidden_size"], target["vocab_size"])
    assert config["rope_theta"] == target["rope_parameters"]["rope_theta"]
    weights = load_file(pipeline.exported / "model.safetensors")
    assert len(weights) == 11 * 1 + 3
    assert weights["fc.weight"].shape == (32, 32 * len(LAYER_IDS))
    assert not any("embed" in name or "lm_head" in name for name in weights)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    read: Any = Qwen3Config.from_pretrained(pipeline.exported)
    assert read.layer_types == ["full_attention"] and read.sliding_window is None


@pytest.mark.parametrize("drafter", ["exported", "run"])
def test_evaluation_proves_equal_output(pipeline: Pipeline, drafter: str) -> None:
    report = call_json(
        train_main, "eval", "--target", pipeline.target, "--drafter", getattr(pipeline, drafter),
        "--prompts", pipeline.prompts, "--dtype", "float32", "--max-new-tokens", 12, "--device", "cpu", "--threads", 1,
    )  # fmt: skip
    assert report["identical"] == report["num_prompts"] == NUM_PROMPTS
    assert report["acceptance_length"] >= 1 and report["acceptance_length_pooled"] >= 1
    assert len(report["by_position"]) == BLOCK_SIZE - 1
    assert report["tokens_per_second"] > 0 and report["plain_tokens_per_second"] > 0


@torch.inference_mode()
def test_the_decoder_sees_the_features_that_training_saw(pipeline: Pipeline) -> None:
    """The stored features and the ones hooked during decoding, and what the exported drafter makes of each."""
    target, store = load_target(pipeline), Store.open(pipeline.store)
    drafter = load_drafter(pipeline.exported, dtype=torch.float32)
    for sample in (0, 5, 11):
        ids = torch.from_numpy(store.read_tokens(sample)[0].astype(np.int64))
        stored = torch.from_numpy(store.read_hidden(sample, LAYER_IDS).view(np.int16)).view(torch.bfloat16).flatten(1)
        # A prompt and then a block on trial, as the decoder goes; rows that were taken back do not count.
        half = len(ids) // 2
        with TargetState(target, LAYER_IDS) as state:
            state.prefill(ids[:half])
            hooked = [state.features()]
            for first in range(half, len(ids), 2):
                block = torch.cat([ids[first : first + 2], ids[:1]])
                _, keep = state.propose(block)
                keep(len(block) - 1)
                hooked.append(state.features()[: len(block) - 1])
        found = torch.cat(hooked)
        assert found.shape == stored.shape
        torch.testing.assert_close(found.float(), stored.float(), rtol=0.05, atol=0.05)
        ours, theirs = (_draft(drafter, target, features.float(), int(ids[-1])) for features in (stored, found))
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def _draft(drafter: DFlashDrafter, target: Any, features: Tensor, anchor: int) -> Tensor:
    """Final states of the block after `features`."""
    cache = drafter.new_cache()
    drafter.extend(cache, features)
    block = torch.tensor([anchor] + [drafter.config.mask_token_id] * (BLOCK_SIZE - 1))
    return drafter.draft_block(target_parts(target).embedding[block].float(), cache)


def test_the_same_commands_again_change_nothing(pipeline: Pipeline) -> None:
    before = (pipeline.run / "metrics.jsonl").read_bytes()
    weights = (pipeline.exported / "model.safetensors").read_bytes()
    call(train_main, *train_arguments(pipeline.store, pipeline.run))
    call(train_main, "export", "--run", pipeline.run, "--out", pipeline.exported)
    assert (pipeline.run / "metrics.jsonl").read_bytes() == before
    assert (pipeline.exported / "model.safetensors").read_bytes() == weights


def test_misuse_exits_2_and_failure_exits_1_with_nothing_on_standard_output(pipeline: Pipeline, tmp_path: Path) -> None:
    outside = call(train_main, *train_arguments(pipeline.store, tmp_path, **{"mask-token-id": 9999}), exit_code=2)
    assert outside.stdout == "" and "mask_token_id" in outside.stderr
    missing = call(train_main, *train_arguments(tmp_path / "no.zarr", tmp_path / "out"), exit_code=1)
    assert missing.stdout == "" and "no.zarr" in missing.stderr
