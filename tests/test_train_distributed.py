"""Several ranks train what one process trains: after a kill, on another number of ranks, and they stop together."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from cache_tools.errors import CheckpointError
from cache_tools.reader import Store
from cache_tools.synthetic import make_store
from train.metrics import read_metrics
from train.summary import summarize

LENGTHS = random.Random(1).choices(range(8, 41), k=60)
SECONDS = 60  # far more than any run here takes; what hangs fails
ROOT = Path(__file__).resolve().parent.parent
# A server that has imported torch once forks the ranks, which saves most of their start.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["train.loop", "train.cli", "torch._dynamo"])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distributed") / "s.zarr"
    make_store(path, LENGTHS)
    return path


def arguments(store: Path, out: Path, **changes: object) -> list[str]:
    settings: dict[str, object] = {
        "store": store, "out": out, "block_size": 4, "mask_token_id": 5, "num_draft_layers": 1, "token_budget": 96,
        "packs_per_step": 4, "anchors_per_step": 48, "steps": 8, "lr": 1e-3, "precision": "fp32", "device": "cpu",
        "threads": 1, "log_every": 4, "checkpoint_every": 3, "noise_start": 0.1,
    }  # fmt: skip
    flags = {name.replace("_", "-"): value for name, value in (settings | changes).items()}
    return ["run", *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]


def run_rank(given: Sequence[str], logs: Path, environment: Mapping[str, str], sabotage: Callable[[], None]) -> None:
    """One rank, as torchrun would start it; what it prints goes to `logs`."""
    from train.cli import main

    os.environ.update(environment)
    for descriptor, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(logs / f"{environment['RANK']}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sabotage()
    main(list(given))


def nothing() -> None:
    return


@contextmanager
def ranks(
    world_size: int,
    given: Sequence[str],
    logs: Path,
    *,
    sabotage: Mapping[int, Callable[[], None]] | None = None,
    other_flags: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[list[BaseProcess]]:
    """Starts the ranks of a run; none outlives the block."""
    logs.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        flags = [*given, *(other_flags or {}).get(rank, ())]
        harm = (sabotage or {}).get(rank, nothing)
        processes.append(CONTEXT.Process(target=run_rank, args=(flags, logs, own, harm)))
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def wait(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Exit codes; None for what still ran after `SECONDS`."""
    deadline = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


def run(world_size: int, given: Sequence[str], logs: Path, **more: Any) -> list[int | None]:
    with ranks(world_size, given, logs, **more) as processes:
        return wait(processes)


def errors(logs: Path) -> list[str]:
    """What each rank printed to standard error."""
    return [path.read_text() for path in sorted(logs.glob("*.err"))]


def curve(out: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in names) for line in read_metrics(out / "metrics.jsonl")]


def assert_same_training(found: Path, expected: Path) -> None:
    exact = ("step", "epoch", "order_hash", "tokens", "blocks", "slots", "source_tokens")
    assert curve(found, *exact) == curve(expected, *exact)
    for name in ("loss", "grad_norm"):
        assert [x for (x,) in curve(found, name)] == pytest.approx([x for (x,) in curve(expected, name)], rel=1e-5)


@pytest.fixture(scope="module")
def alone(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process without torchrun's variables."""
    from click.testing import CliRunner

    from train.cli import main

    out = tmp_path_factory.mktemp("alone") / "run"
    result = CliRunner().invoke(main, arguments(store, out))
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_any_number_of_ranks_trains_what_one_process_trains(
    store: Path, alone: Path, tmp_path: Path, world_size: int
) -> None:
    """2 ranks share 4 packs evenly, 3 do not, and of 5 one never gets a pack."""
    out = tmp_path / "run"
    pieces = dict.fromkeys(range(world_size), small_buckets)
    assert run(world_size, arguments(store, out), tmp_path / "logs", sabotage=pieces) == [0] * world_size
    assert_same_training(out, alone)
    printed = [(tmp_path / "logs" / f"{rank}.out").read_text() for rank in range(world_size)]
    assert "step=8 " in printed[0] and "done: 8 steps" in printed[0]
    assert printed[1:] == [""] * (world_size - 1)
    assert errors(tmp_path / "logs") == [""] * world_size
    assert summarize(out)["order_hash"] == summarize(alone)["order_hash"]


def small_buckets() -> None:
    patch("train.ranks._BUCKET_ELEMENTS", 700).start()  # between the sizes of the drafter's parameters


def test_kill_9_of_all_ranks_at_random_steps_and_resumption_on_other_numbers_of_ranks(
    store: Path, tmp_path: Path
) -> None:
    steps, rng = 24, random.Random(7)
    changes = {"steps": steps, "checkpoint_every": 2}
    assert run(1, arguments(store, tmp_path / "whole", **changes), tmp_path / "logs") == [0]
    metrics = tmp_path / "killed" / "metrics.jsonl"
    kills = (*sorted(rng.sample(range(3, steps - 2), 3)), None)
    for world_size, kill_at in zip((3, 1, 2, 3), kills, strict=True):
        with ranks(world_size, arguments(store, tmp_path / "killed", **changes), tmp_path / "logs") as processes:
            deadline = time.monotonic() + SECONDS
            while kill_at is not None and time.monotonic() < deadline:
                if metrics.exists() and metrics.read_bytes().count(b"\n") >= kill_at:
                    for process in processes:
                        process.kill()
                    break
                time.sleep(0.002)
            codes = wait(processes)
        assert codes == [0 if kill_at is None else -signal.SIGKILL] * world_size
    assert_same_training(tmp_path / "killed", tmp_path / "whole")


def a_damaged_sample() -> None:
    original = Store.read_hidden

    def read_hidden(self: Store, sample: int, *given: Any, **named: Any) -> Any:
        if sample == 17 and "out" in named:  # so the loader asks
            raise OSError(5, "input/output error")
        return original(self, sample, *given, **named)

    patch("cache_tools.reader.Store.read_hidden", read_hidden).start()


def a_bug() -> None:
    patch("train.loop.block_loss", side_effect=ZeroDivisionError("a bug")).start()


def a_full_disk() -> None:
    error = CheckpointError("this could not be written", got="no space left")
    patch("train.checkpoint.save", side_effect=error).start()


def sudden_death() -> None:
    patch("train.loop.block_loss", side_effect=lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)).start()


def test_an_unreadable_sample_counts_alike_on_any_number_of_ranks(store: Path, tmp_path: Path) -> None:
    outs = [tmp_path / "one", tmp_path / "three"]
    for world_size, out in zip((1, 3), outs, strict=True):
        given = arguments(store, out, max_unreadable=9)
        damaged = dict.fromkeys(range(world_size), a_damaged_sample)
        assert run(world_size, given, tmp_path / f"logs-{world_size}", sabotage=damaged) == [0] * world_size
    assert_same_training(outs[1], outs[0])
    assert curve(outs[1], "unreadable") == curve(outs[0], "unreadable")
    found = summarize(outs[1])["unreadable"]
    assert 0 < found == (tmp_path / "logs-3" / "0.out").read_text().count("sample 17 is left out of step")


@pytest.mark.parametrize(
    ("culprit", "harm", "said"),
    [
        (1, a_damaged_sample, r"^error: A sample could not be read[\s\S]*sample 17\b[\s\S]*input/output error"),
        (2, a_bug, r"ZeroDivisionError: a bug"),
        (0, a_full_disk, r"^error: this could not be written\n  got: no space left"),
    ],
)
def test_what_fails_on_one_rank_ends_all_with_one_message(
    store: Path, tmp_path: Path, culprit: int, harm: Callable[[], None], said: str
) -> None:
    """Also when it is the very last thing that the first rank has to do, the others wait for it."""
    given = arguments(store, tmp_path / "run", steps=30, checkpoint_every=30)
    assert run(3, given, tmp_path / "logs", sabotage={culprit: harm}) == [1, 1, 1]
    found = errors(tmp_path / "logs")
    assert re.search(said, found.pop(culprit))
    assert found == ["", ""]


def test_ranks_end_when_one_dies_without_a_word(store: Path, tmp_path: Path) -> None:
    codes = run(3, arguments(store, tmp_path / "run"), tmp_path / "logs", sabotage={1: sudden_death})
    assert codes == [1, -signal.SIGKILL, 1]
    for said in (errors(tmp_path / "logs")[rank] for rank in (0, 2)):
        assert said.startswith("error: the connection to another rank was lost") and "Traceback" not in said


def little_patience() -> None:
    patch("train.ranks._TIMEOUT", timedelta(seconds=5)).start()


def silence() -> None:
    little_patience()
    patch("train.loop.block_loss", side_effect=lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)).start()


def test_ranks_do_not_wait_for_ever_for_one_that_stands_still(store: Path, tmp_path: Path) -> None:
    harm = {0: little_patience, 1: silence, 2: little_patience}
    with ranks(3, arguments(store, tmp_path / "run"), tmp_path / "logs", sabotage=harm) as processes:
        assert wait([processes[0], processes[2]]) == [1, 1]
    for said in (errors(tmp_path / "logs")[rank] for rank in (0, 2)):
        assert said.startswith("error: the connection to another rank was lost") and "Traceback" not in said


def test_what_is_wrong_on_every_rank_is_said_once(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(1, arguments(store, out, steps=3), tmp_path / "first") == [0]
    assert run(3, arguments(store, out, steps=3, seed=1), tmp_path / "logs") == [1, 1, 1]
    first, *others = errors(tmp_path / "logs")
    assert first.startswith("error: this run began with other settings") and "--seed" in first
    assert others == ["", ""]


def test_ranks_with_different_flags_are_refused(store: Path, tmp_path: Path) -> None:
    given = arguments(store, tmp_path / "run")
    codes = run(2, given, tmp_path / "logs", other_flags={1: ["--lr", "0.5", "--prefetch-mb", "3"]})
    assert codes == [1, 1]
    said = "".join(errors(tmp_path / "logs"))
    assert "would not train the same run\n  got: lr: 0.5 and 0.001\n" in said
    assert said.count("error: ") == 1
    assert not (tmp_path / "run").exists()


def test_torchrun_starts_the_command(store: Path, alone: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    script = [sys.executable, "-c", "from train.cli import main; main()"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    given = [*command, *script, *arguments(store, tmp_path / "run")]
    done = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done: 8 steps") == 1
    assert_same_training(tmp_path / "run", alone)
