"""Training that starts from an existing drafter: it begins with exactly that drafter, or says what differs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_cli import LENGTHS, arguments, call, refused
from test_train_drafter import hybrid_target

from cache_tools.errors import ConfigError
from cache_tools.layer_ids import default_layer_ids
from cache_tools.reader import Store
from cache_tools.settings import load_config
from cache_tools.synthetic import make_store
from precompute.config import PrecomputeConfig
from train import checkpoint as checkpoints
from train.config import TrainConfig
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.export import export_drafter
from train.init_drafter import _refuse_differences
from train.metrics import read_metrics
from train.state import drafter_config_for
from train.zlab_format import config_from_json

FULL, SLIDING = "full_attention", "sliding_attention"
BASE: dict[str, Any] = {"block_size": 4, "mask_token_id": 5, "num_draft_layers": 2}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("init") / "s.zarr"
    make_store(path, LENGTHS)
    return path


def run_config(store: Path, **changes: Any) -> DrafterConfig:
    """The drafter that a run with these settings trains."""
    opened = Store.open(store)
    return drafter_config_for(TrainConfig(store=store, out=store, **BASE, **changes), opened, opened.layer_ids)


def export(config: DrafterConfig, folder: Path) -> Path:
    export_drafter(DFlashDrafter(config, seed=9), folder)
    return folder


def same_files(first: Path, second: Path) -> bool:
    return all((first / n).read_bytes() == (second / n).read_bytes() for n in ("config.json", "model.safetensors"))


def given(store: Path, out: Path, drafter: Path, **changes: Any) -> Any:
    return arguments(store, out, num_draft_layers=2, init_drafter=drafter, **changes)


@pytest.mark.parametrize("whiten", [True, False])
def test_a_run_of_no_steps_gives_back_the_very_files_it_began_with(store: Path, tmp_path: Path, whiten: bool) -> None:
    """Also through the run's division of `fc` by the features' scale, which export multiplies back."""
    drafter = export(run_config(store), tmp_path / "d")
    flags = given(store, tmp_path / "run", drafter, steps=0)
    said = call([*flags, "--whiten" if whiten else "--no-whiten"]).stdout
    assert f"all weights start as those of {drafter}" in said
    call(["export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "again")])
    assert same_files(tmp_path / "again", drafter)


def test_sliding_drafters_other_runs_and_library_checkpoints_are_taken(store: Path, tmp_path: Path) -> None:
    window = {"num_sliding_layers": 1, "sliding_window": 8}
    drafter = export(run_config(store, **window), tmp_path / "d")
    (tmp_path / "s").mkdir()
    write_as_speculators(drafter, tmp_path / "s")
    call(given(store, tmp_path / "run", drafter, steps=2, **window))
    for name in ("s", "run"):
        call(given(store, tmp_path / f"from-{name}", tmp_path / name, steps=0, **window))
        call(["export", "--run", str(tmp_path / f"from-{name}"), "--out", str(tmp_path / f"{name}-again")])
    assert same_files(tmp_path / "s-again", drafter)
    call(["export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "trained")])
    assert same_files(tmp_path / "run-again", tmp_path / "trained")
    assert not same_files(tmp_path / "trained", drafter)


def write_as_speculators(drafter: Path, folder: Path) -> None:
    """What the library writes: the number of target layers, which a run knows, is not in it."""
    plain = json.loads((drafter / "config.json").read_text())
    own = plain.pop("dflash_config")
    top = {name: plain.pop(name) for name in ("architectures", "block_size")}
    del plain["num_target_layers"]
    ids = [i + 1 for i in own["target_layer_ids"]]
    top |= {"speculators_model_type": "dflash", "transformer_layer_config": plain, "aux_hidden_state_layer_ids": ids}
    (folder / "config.json").write_text(json.dumps(top | {"mask_token_id": own["mask_token_id"]}))
    (folder / "model.safetensors").write_bytes((drafter / "model.safetensors").read_bytes())


def test_the_first_loss_is_the_drafters_and_a_resumed_run_does_not_need_it_again(store: Path, tmp_path: Path) -> None:
    call(arguments(store, tmp_path / "first", num_draft_layers=2, steps=20, lr=3e-3))
    last = [line["loss"] for line in read_metrics(tmp_path / "first" / "metrics.jsonl")]
    call(["export", "--run", str(tmp_path / "first"), "--out", str(tmp_path / "d")])
    call(given(store, tmp_path / "warm", tmp_path / "d", steps=4))
    warm = [line["loss"] for line in read_metrics(tmp_path / "warm" / "metrics.jsonl")]
    assert warm[0] < (last[0] + last[-1]) / 2
    assert "done: 4 steps" in call(given(store, tmp_path / "warm", tmp_path / "gone", steps=4)).stdout


# Another value for every setting of a drafter, what the error says of it, and the flags that it advises.
OTHER: dict[str, tuple[Callable[[DrafterConfig], dict[str, Any]], str, str]] = {
    "hidden_size": (lambda c: {"hidden_size": 24}, "hidden_size 24", "no flag sets hidden_size"),
    "intermediate_size": (lambda c: {"intermediate_size": 7}, "intermediate_size 7", "--intermediate-size 7"),
    "num_hidden_layers": (
        lambda c: {"num_hidden_layers": 1, "layer_types": (FULL,)},
        "num_hidden_layers 1",
        "--num-draft-layers 1",
    ),
    "num_attention_heads": (lambda c: {"num_attention_heads": 4}, "num_attention_heads 4", "--num-heads 4"),
    "num_key_value_heads": (lambda c: {"num_key_value_heads": 2}, "num_key_value_heads 2", "--num-kv-heads 2"),
    "head_dim": (lambda c: {"head_dim": 6}, "head_dim 6", "--head-dim 6"),
    "vocab_size": (lambda c: {"vocab_size": 65}, "vocab_size 65", "no flag sets vocab_size"),
    "block_size": (lambda c: {"block_size": 6}, "block_size 6", "--block-size 6"),
    "mask_token_id": (lambda c: {"mask_token_id": 6}, "mask_token_id 6", "--mask-token-id 6"),
    "target_layer_ids": (lambda c: {"target_layer_ids": (3, 1)}, "target_layer_ids 3,1", "--layer-ids 3,1"),
    "num_target_layers": (lambda c: {"num_target_layers": 9}, "num_target_layers 9", "no flag sets num_target_layers"),
    "rope_theta": (lambda c: {"rope_theta": 7.0}, "rope_theta 7.0", "no flag sets rope_theta"),
    "rms_norm_eps": (lambda c: {"rms_norm_eps": 0.5}, "rms_norm_eps 0.5", "no flag sets rms_norm_eps"),
    "layer_types": (
        lambda c: {"layer_types": (SLIDING, FULL), "sliding_window": 8},
        f"layer_types {SLIDING},{FULL}",
        "--num-sliding-layers 1",
    ),
    "sliding_window": (
        lambda c: {"layer_types": (SLIDING, FULL), "sliding_window": 8},
        "sliding_window 8",
        "--sliding-window 8",
    ),
}


def test_every_setting_that_anything_is_computed_from_is_among_the_cases() -> None:
    unused = {"max_position_embeddings", "eos_token_id", "pad_token_id"}
    assert OTHER.keys() == {field.name for field in fields(DrafterConfig)} - unused


@pytest.mark.parametrize("name", OTHER)
def test_every_difference_is_refused_by_name_and_the_advised_flags_remove_it(
    store: Path, tmp_path: Path, name: str
) -> None:
    changes, said, advice = OTHER[name]
    config = run_config(store)
    drafter = export(replace(config, **changes(config)), tmp_path / "d")
    flags = given(store, tmp_path / "run", drafter, steps=0)
    refused(flags, rf"(?s){re.escape(said)}.*expected: .*{name} .*{re.escape(advice)}", exit_code=1)
    assert checkpoints.latest(tmp_path / "run") is None
    if advice.startswith("--"):
        error = call(flags, exit_code=1).stderr
        advised = re.search("train with (--.*)", error)
        assert advised is not None
        call([*flags, *advised[1].split()])


def test_differences_that_change_nothing_are_taken(store: Path, tmp_path: Path) -> None:
    config = replace(run_config(store), max_position_embeddings=77, eos_token_id=3, pad_token_id=4)
    call(given(store, tmp_path / "run", export(config, tmp_path / "d"), steps=0))


def test_layer_types_that_no_flag_can_express_are_not_promised_one(store: Path, tmp_path: Path) -> None:
    config = replace(run_config(store), layer_types=(FULL, SLIDING), sliding_window=2048)
    drafter = export(config, tmp_path / "d")
    refused(given(store, tmp_path / "run", drafter), "no flag sets layer_types", exit_code=1)


def test_a_drafter_with_fewer_sliding_layers_than_the_run_gets_the_flag_for_none(store: Path, tmp_path: Path) -> None:
    drafter = export(run_config(store), tmp_path / "d")
    flags = given(store, tmp_path / "run", drafter, num_sliding_layers=1, sliding_window=8)
    refused(flags, r"(?s)sliding_window None.*train with --num-sliding-layers 0\n", exit_code=1)


def test_two_starts_exclude_each_other(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exclude"):
        TrainConfig(store=store, out=tmp_path, init_target=tmp_path, init_drafter=tmp_path, **BASE)


def test_a_folder_without_a_drafter_is_named(store: Path, tmp_path: Path) -> None:
    refused(given(store, tmp_path / "run", tmp_path), "no drafter here", exit_code=1)


def test_weights_are_taken_in_full_precision(store: Path, tmp_path: Path) -> None:
    """Of another run: its checkpoint holds float32, and rounding it would throw small steps away."""
    call(arguments(store, tmp_path / "first", num_draft_layers=2, steps=2))
    call(given(store, tmp_path / "second", tmp_path / "first", steps=0))
    first, second = (checkpoints.latest(tmp_path / name) for name in ("first", "second"))
    assert first is not None and second is not None
    ours, theirs = checkpoints.load(second).weights, checkpoints.load(first).weights
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=0)


# config.json of the published drafter for Qwen3.6-27B, without keys that nothing is computed from.
PUBLISHED_27B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "num_target_layers": 64,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 248320,
    "max_position_embeddings": 262144, "rope_theta": 1e7, "rope_scaling": None, "attention_bias": False,
    "layer_types": [SLIDING] * 4 + [FULL], "use_sliding_window": True, "sliding_window": 2048,
}  # fmt: skip


class TargetFiles:
    """As much of a store as the drafter's shape depends on."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._config = folder / "config.json"
        self._config.write_text(json.dumps(config))

    def target_files(self) -> list[str]:
        return [self._config.name]

    def target_file(self, _: str) -> Path:
        return self._config


def test_the_example_for_qwen36_27b_trains_exactly_the_published_drafter(tmp_path: Path) -> None:
    store: Any = TargetFiles(tmp_path, hybrid_target())
    example = Path(__file__).resolve().parent.parent / "examples" / "qwen3.6-27b"
    config = load_config(TrainConfig, example / "train.yaml", {"store": tmp_path, "out": tmp_path})
    planned = load_config(PrecomputeConfig, example / "precompute.yaml", {"target": tmp_path, "data": (tmp_path,)})
    assert planned.layer_ids is None
    taps = default_layer_ids(64, planned.num_draft_layers)
    _refuse_differences(config_from_json(PUBLISHED_27B, tmp_path), drafter_config_for(config, store, taps), tmp_path)
