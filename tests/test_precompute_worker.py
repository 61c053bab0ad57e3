"""Commands that are killed: whatever the moment, the same command afterwards ends with the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from precompute_cases import (
    SMALL_SHARD_BYTES,
    chats,
    directory_bytes,
    make_precompute_config,
    write_jsonl,
)

from cache_tools.integrity import verify
from precompute.run import run

REPOSITORY = Path(__file__).resolve().parent.parent


RUN_WITH_SMALL_SHARDS = """
import sys
sys.path[:0] = [{repository!r}, {tests!r}]
import precompute.planning
precompute.planning._MB = {small}
from precompute.cli import main
main(sys.argv[1:])
"""

pytestmark = pytest.mark.usefixtures("small_shards")


def start_run(target: Path, data: Path, store: Path, workers: int = 1) -> subprocess.Popen[bytes]:
    script = RUN_WITH_SMALL_SHARDS.format(
        repository=str(REPOSITORY), tests=str(REPOSITORY / "tests"), small=SMALL_SHARD_BYTES
    )
    options = {"target": target, "data": data, "store": store, "layer-ids": "0,2", "chunk-rows": 8, "shard-mb": 1}
    options |= {"batch-tokens": 256, "max-length": 256, "device": "cpu", "threads": workers, "workers": workers}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, "run", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("most_kills", "num_rows"), [(2, 150), pytest.param(50, 600, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
def test_killed_at_any_moment_the_same_command_ends_with_the_same_bytes(
    most_kills: int, num_rows: int, target: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "many.jsonl", chats(num_rows))
    reference = make_precompute_config(target, data, tmp_path / "whole")
    run(reference)
    store = tmp_path / "killed"
    chance = random.Random(most_kills)
    num_kills = num_seals = 0
    while num_kills < most_kills:
        process = start_run(target, data, store)
        # Most of a run is importing: wait until something new is written, then strike a random moment later.
        if not store.exists() and num_kills < most_kills // 5:
            wait_for_planning(process, store)
        else:
            wait_for_progress(process, store, num_seals)
        time.sleep(chance.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors.decode()
        num_kills += 1
        now = len(list(store.glob("sealed/*.json")))
        assert now >= num_seals, "a seal was lost"
        num_seals = now
    assert start_run(target, data, store).wait() == 0
    assert num_kills > 0
    assert directory_bytes(store) == directory_bytes(tmp_path / "whole")
    assert verify(store) == []


@pytest.mark.slow
def test_workers_die_with_their_command_and_the_next_one_goes_on_at_once(target: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "many.jsonl", chats(150))
    run(make_precompute_config(target, data, tmp_path / "whole"))
    process = start_run(target, data, tmp_path / "killed", workers=2)
    wait_for_progress(process, tmp_path / "killed", 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = start_run(target, data, tmp_path / "killed", workers=2)
    _, errors = again.communicate()
    assert again.returncode == 0, errors.decode()
    assert directory_bytes(tmp_path / "killed") == directory_bytes(tmp_path / "whole")


def wait_for_progress(process: subprocess.Popen[bytes], store: Path, num_seals: int) -> None:
    """Returns when the process ended, or the store has more seals than before."""
    while process.poll() is None and len(list(store.glob("sealed/*.json"))) <= num_seals:
        time.sleep(0.002)


def wait_for_planning(process: subprocess.Popen[bytes], store: Path) -> None:
    """Returns when the process ended, or writes its plan."""
    while process.poll() is None and not store.exists() and not list(store.parent.glob(f".tmp-*-{store.name}")):
        time.sleep(0.002)
