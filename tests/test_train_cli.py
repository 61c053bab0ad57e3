"""`dflash-train` from outside: exit codes, what goes to which stream, refusals, interruption, full disks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors import SafetensorError
from test_train_metrics import LINE

from cache_tools.synthetic import make_store
from train import checkpoint as checkpoints
from train.cli import main
from train.loader import Loader, StepBatch
from train.metrics import read_metrics
from train.run_files import run_lock

LENGTHS = [9, 14, 6, 21, 11, 8, 17, 30, 12, 25] * 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "s.zarr"
    make_store(path, LENGTHS)
    return path


def arguments(store: Path, out: Path, **changes: object) -> Sequence[str]:
    settings: dict[str, object] = {
        "store": store, "out": out, "block_size": 4, "mask_token_id": 5, "num_draft_layers": 1, "token_budget": 64,
        "packs_per_step": 2, "anchors_per_step": 24, "steps": 6, "precision": "fp32", "device": "cpu", "threads": 1,
        "log_every": 2, "checkpoint_every": 2,
    }  # fmt: skip
    flags = {name.replace("_", "-"): value for name, value in (settings | changes).items() if value is not None}
    return ["run", *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]


def call(given: Sequence[str], exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, given)
    assert result.exit_code == exit_code, result.output
    return result


def refused(given: Sequence[str], said: str, exit_code: int = 2) -> None:
    """Nothing on standard output but what was known before, one message on standard error, no traceback."""
    result = call(given, exit_code)
    assert re.search(said, result.stderr), result.stderr
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    assert not any(line.startswith(("[", "done")) for line in result.stdout.splitlines())


def add_target_file(store: Path, name: str, content: Any) -> None:
    (store / "target" / "files" / name).write_text(json.dumps(content))


def test_a_run_prints_its_lines_to_standard_output_only(store: Path, tmp_path: Path) -> None:
    result = call(arguments(store, tmp_path / "run"))
    first, cost, warning, *lines, last = result.stdout.splitlines()
    assert first.startswith("30 samples, 459 tokens; drafter: 1 layers") and "taps [1, 3]; 6 steps" in first
    assert re.fullmatch(r"a step: at most \S+ MFLOP in matrix products, \S+ KB of hidden states", cost)
    assert warning.startswith("warning: the mask token")  # random tokens: the data contains it
    assert [(found := LINE.fullmatch(line)) and found[1] for line in lines] == ["1", "2", "4", "6"]
    assert re.fullmatch(rf"done: 6 steps, loss \S+ -> \S+, \S+ Ktok/s; {tmp_path / 'run'}", last)
    assert result.stderr == ""
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 6


def test_the_written_config_starts_the_same_run(store: Path, tmp_path: Path) -> None:
    call(arguments(store, tmp_path / "one"))
    call(["run", "--config", str(tmp_path / "one" / "config.yaml"), "--out", str(tmp_path / "two")])
    curves = [[line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("one", "two")]
    assert curves[0] == curves[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask_token_id": None}, "--mask-token-id"),
        ({"mask_token_id": 64}, r"vocabulary[\s\S]*0 to 63"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"token_budget": 20}, r"(?i)token.budget"),
        ({"num_sliding_layers": 2}, "sliding"),
        ({"num_sliding_layers": 1, "sliding_window": 3}, "sliding_window must cover"),
        ({"num_kv_heads": 3}, "num_key_value_heads"),
        ({"block_size": 1}, "block_size"),
        ({"steps": -1}, "steps"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": "nan"}, "epochs"),
        ({"layer_ids": "1,1"}, "distinct"),
        ({"lr": "inf"}, "lr must be a finite number"),
        ({"noise_start": "nan"}, "noise_start[\\s\\S]*a finite number"),
        ({"beta1": 1}, "beta1 must be at least 0 and less than 1"),
        ({"sliding_window": 8}, "sliding_window has no effect without sliding layers"),
    ],
)
def test_settings_that_cannot_work_are_named(store: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    refused(arguments(store, tmp_path / "run", **changes), said)
    assert not (tmp_path / "run").exists()


def test_a_typing_error_in_the_config_file_gets_a_suggestion(store: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("blok_size: 4\n")
    refused([*arguments(store, tmp_path / "run"), "--config", str(tmp_path / "c.yaml")], "did you mean 'block_size'")
    (tmp_path / "c.yaml").write_text("lr: fast\n")
    given = [*arguments(store, tmp_path / "run"), "--config", str(tmp_path / "c.yaml")]
    refused(given, r"'lr' has a wrong value[\s\S]*'fast'")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", {"eos_token_id": [3, 5]}),
        ("generation_config.json", {"pad_token_id": 5}),
        ("tokenizer_config.json", {"eos_token": "w5"}),
        ("tokenizer_config.json", {"pad_token": {"content": "w5"}}),
    ],
)
def test_end_and_padding_tokens_are_no_mask_token(tmp_path: Path, name: str, content: Any) -> None:
    make_store(tmp_path / "s.zarr", LENGTHS)
    tokenizer = tmp_path / "s.zarr" / "target" / "files" / "tokenizer.json"
    plain = json.loads(tokenizer.read_text())
    add_target_file(tmp_path / "s.zarr", "tokenizer.json", plain | {"added_tokens": [{"id": 5, "content": "w5"}]})
    add_target_file(tmp_path / "s.zarr", name, content)
    refused(arguments(tmp_path / "s.zarr", tmp_path / "run"), "mask_token_id is the target's (eos|pad)_token")
    call(arguments(tmp_path / "s.zarr", tmp_path / "run", mask_token_id=6, steps=1))


def test_a_fraction_of_an_epoch_trains_a_step(store: Path, tmp_path: Path) -> None:
    result = call(arguments(store, tmp_path / "run", steps=None, epochs=0.01))
    assert "done: 1 steps" in result.stdout


def test_a_step_may_hold_more_packs_than_there_are_samples(store: Path, tmp_path: Path) -> None:
    call(arguments(store, tmp_path / "run", packs_per_step=40, steps=2))
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["epoch"] > 1


def test_rejected_samples_are_left_out_and_all_of_them_are_an_error(tmp_path: Path) -> None:
    make_store(tmp_path / "some.zarr", LENGTHS, rejected=[0, 7])
    call(arguments(tmp_path / "some.zarr", tmp_path / "some"))
    make_store(tmp_path / "all.zarr", LENGTHS, rejected=range(len(LENGTHS)))
    refused(arguments(tmp_path / "all.zarr", tmp_path / "all"), "30 of 30 samples rejected", exit_code=1)


def test_a_store_with_other_layers_does_not_continue_a_run(store: Path, tmp_path: Path) -> None:
    call(arguments(store, tmp_path / "run"))
    make_store(tmp_path / "other.zarr", LENGTHS, layer_ids=(2, 4))
    refused(arguments(tmp_path / "other.zarr", tmp_path / "run"), r"\[1, 3\] -> \[2, 4\]", exit_code=1)


@pytest.mark.parametrize("changes", [{"codec": "int8"}, {"teacher": "topk:4"}])
def test_a_store_with_other_states_or_another_teacher_does_not_continue_a_run(
    store: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    call(arguments(store, tmp_path / "run"))
    make_store(tmp_path / "other.zarr", LENGTHS, **changes)
    refused(arguments(tmp_path / "other.zarr", tmp_path / "run"), "got: what the store holds: ", exit_code=1)


def flip_byte(path: Path, position: float) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[int(len(damaged) * position)] ^= 64
    path.write_bytes(damaged)


def test_a_flipped_byte_in_the_store_names_sample_and_shard_and_keeps_the_checkpoints(tmp_path: Path) -> None:
    make_store(tmp_path / "s.zarr", LENGTHS)
    flip_byte(tmp_path / "s.zarr" / "hidden" / "1" / "bits" / "c" / "3" / "0", 0.25)
    result = call(arguments(tmp_path / "s.zarr", tmp_path / "run", steps=100), exit_code=1)
    assert re.search(r"error: damaged store: sample \d+ cannot be read\n.*shard 3\b", result.stderr)


def test_the_last_checkpoint_does_not_wait_for_a_step_that_nobody_needs(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Loader.__next__

    def limited(self: Loader) -> StepBatch:
        batch = original(self)
        assert batch.step < 6, "a step beyond the last was asked for"
        return batch

    monkeypatch.setattr(Loader, "__next__", limited)
    call(arguments(store, tmp_path / "run", checkpoint_every=100))
    assert checkpoints.latest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step-000000006"


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("damage", ["flip", "empty"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_continues(
    store: Path, tmp_path: Path, name: str, damage: str
) -> None:
    call(arguments(store, tmp_path / "run"))
    whole = (tmp_path / "run" / "metrics.jsonl").read_text()
    newest = checkpoints.latest(tmp_path / "run")
    assert newest is not None
    if damage == "flip":
        flip_byte(newest / name, 0.6)
    else:
        (newest / name).write_bytes(b"")
    refused(arguments(store, tmp_path / "run"), rf"{newest}[\s\S]*{name}[\s\S]*remove this folder", exit_code=1)
    newest.rename(tmp_path / "removed")
    result = call(arguments(store, tmp_path / "run"))
    assert "resuming at step 4 of 6" in result.stdout
    without_time = [re.sub('"seconds".*', "", text) for text in (whole, (tmp_path / "run/metrics.jsonl").read_text())]
    assert without_time[0] == without_time[1]


def test_a_folder_that_cannot_be_written_is_a_message(store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    given = arguments(store, tmp_path / "file" / "run")
    result = call(given, exit_code=1)
    assert "could not be written" in result.stderr and str(tmp_path / "file" / "run") in result.stderr


@pytest.mark.parametrize("function", ["save_file", "torch.save"])
def test_a_full_disk_at_a_checkpoint_is_a_message_and_the_run_goes_on_later(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def full(*_: object, **__: object) -> None:
        if function == "save_file":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: No space left on device")

    call(arguments(store, tmp_path / "whole"))
    with monkeypatch.context() as patched:
        patched.setattr(f"train.checkpoint.{function}", full)
        result = call(arguments(store, tmp_path / "run"), exit_code=1)
    assert re.search(r"error: this could not be written\n.*step-000000002\n.*No space left", result.stderr)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    call(arguments(store, tmp_path / "run"))
    curves = [[line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", "run")]
    assert curves[0] == curves[1]


def test_a_second_process_in_the_same_folder_is_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_tools.locking._PATIENCE_SECONDS", 0.0)
    (tmp_path / "run").mkdir()
    with run_lock(tmp_path / "run"):
        refused(arguments(store, tmp_path / "run"), "another process is training in this folder", exit_code=1)
        assert not (tmp_path / "run" / "config.yaml").exists(), "it belongs to the run that holds the lock"
    call(arguments(store, tmp_path / "run"))


def test_interrupting_exits_130_with_a_hint_and_the_run_goes_on(store: Path, tmp_path: Path) -> None:
    given = arguments(store, tmp_path / "run", steps=100_000)
    # A shell's background jobs ignore the signal; a user's terminal does not.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from train.cli import main; main({list(given)!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parent.parent,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[") and "step=6 " in line:
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted; run the same command again to resume from the newest checkpoint\n"
    newest = checkpoints.latest(tmp_path / "run")
    assert newest is not None and checkpoints.load(newest).step >= 4


def test_export_writes_a_drafter_and_only_over_an_earlier_one(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(arguments(store, tmp_path / "run"))
    given = ["export", "--run", str(tmp_path / "run"), "--out"]
    for _ in range(2):
        assert call([*given, str(tmp_path / "d")]).stdout == f"exported 14 tensors to {tmp_path / 'd'}\n"
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    call([*given, "."])
    assert sorted(path.name for path in other.iterdir()) == ["config.json", "model.safetensors"]
    model = {"config.json": '{"architectures": ["LlamaForCausalLM"]}', "model.safetensors": "weights"}
    (tmp_path / "model").mkdir()
    for name, text in model.items():
        (tmp_path / "model" / name).write_text(text)
    refused([*given, str(tmp_path / "model")], "not an exported drafter", exit_code=1)
    assert {path.name: path.read_text() for path in (tmp_path / "model").iterdir()} == model


def test_export_and_eval_of_a_folder_without_a_drafter_say_so(tmp_path: Path) -> None:
    refused(["export", "--run", str(tmp_path), "--out", str(tmp_path / "d")], "no drafter here", exit_code=1)
    call(["export", "--run", str(tmp_path / "none"), "--out", str(tmp_path / "d")], exit_code=2)
