"""`dflash-cache bench`: it reads every sample as training does, and says what the page cache had to do with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from cache_tools import page_cache
from cache_tools.cli import main
from cache_tools.codec_names import Codec
from cache_tools.errors import ConfigError, CorruptError, StoreError
from cache_tools.reader import Store
from cache_tools.reading_speed import ReadingSpeed, measure, report_lines
from cache_tools.synthetic import make_store

LENGTHS = [5, 17, 30, 8, 9, 31, 2, 12, 16, 1, 40]
SETTINGS: dict[str, Any] = {"seconds": 60.0, "num_threads": 3, "token_budget": 64}


def made(path: Path, codec: Codec = "raw", **options: Any) -> Store:
    return make_store(path, LENGTHS, hidden_size=32, codec=codec, **options)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_every_usable_sample_is_read_once_with_all_layers(
    codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = made(tmp_path / "s", codec, rejected=(3,))
    method = "read_hidden" if codec == "bf16" else "read_parts"
    original, calls = getattr(store, method), []

    def counted(sample: int, layers: Any, out: Any) -> NDArray[Any]:
        calls.append((sample, layers))
        read: NDArray[Any] = original(sample, layers, out)
        return read

    monkeypatch.setattr(store, method, lambda sample, layers, out: counted(sample, layers, out))
    speed = measure(store, **SETTINGS)
    usable = sorted(set(range(store.num_samples)) - store.rejected)
    assert speed.whole_store
    assert speed.samples == len(usable)
    assert speed.tokens == store.samples.length[usable].sum()
    read = [(sample, [1, 3]) for sample in usable] if codec == "bf16" else [(s, i) for s in usable for i in (1, 3)]
    assert sorted(calls) == read


def bytes_of(store: Store, *groups: str) -> int:
    """Bytes of the objects of some groups of arrays, without the channel scales, which are read once."""
    paths = [path for group in groups for path in (store.path / group).rglob("c/**/*") if path.is_file()]
    return sum(path.stat().st_size for path in paths if "channel_scale" not in path.parts)


@pytest.mark.parametrize("teacher", ["hidden", "topk:3"])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_what_the_store_holds_of_a_teacher_is_read_and_counted_unless_left_out(
    teacher: str, codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = made(tmp_path / "s", codec, teacher=teacher, rejected=(3,))
    original, read = store.read_teacher, []

    def counted(sample: int) -> dict[str, NDArray[Any]]:
        read.append(sample)
        return original(sample)

    monkeypatch.setattr(store, "read_teacher", counted)
    with_it, without = measure(store, **SETTINGS), measure(store, with_teacher=False, **SETTINGS)
    assert sorted(read) == sorted(set(range(store.num_samples)) - store.rejected)
    assert (with_it.with_teacher, without.with_teacher) == (True, False)
    assert with_it.bytes_per_token == pytest.approx(bytes_of(store, "tokens", "hidden", "last") / sum(LENGTHS))
    assert without.bytes_per_token == pytest.approx(bytes_of(store, "tokens", "hidden") / sum(LENGTHS))
    assert "teacher" in report_lines(with_it)[0] and "teacher" not in report_lines(without)[0]


def test_rates_follow_from_counts(tmp_path: Path) -> None:
    store = made(tmp_path / "s")
    speed = measure(store, gpu_tokens_per_s=10.0, **SETTINGS)
    assert speed.bytes_per_token == pytest.approx(bytes_of(store, "tokens", "hidden") / sum(LENGTHS))
    assert speed.tokens_per_s * speed.seconds == pytest.approx(speed.tokens)
    assert speed.gpus == pytest.approx(speed.tokens_per_s / 10)
    assert 0 < speed.p50_ms <= speed.p99_ms <= speed.seconds * 1e3


def test_it_stops_when_time_is_up(tmp_path: Path) -> None:
    speed = measure(made(tmp_path / "s"), seconds=1e-9, num_threads=1, token_budget=64)
    assert speed.samples == 1 and not speed.whole_store


def test_faults_settings_and_unfinished_stores_are_errors_of_their_kind(tmp_path: Path) -> None:
    store = made(tmp_path / "s")
    with pytest.raises(ConfigError, match="token"):
        measure(store, **{**SETTINGS, "token_budget": 39})
    with pytest.raises(StoreError, match="not complete"):
        measure(made(tmp_path / "part", shards=(0,)), **SETTINGS)
    path = store.path / "hidden/1/bits/c/0/0"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(CorruptError, match="checksum"):
        measure(store, **SETTINGS)


def test_dropped_files_are_not_in_the_page_cache_and_read_ones_are(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10 * 4096 + 7))
    page_cache.drop([path])
    if page_cache.cached_share([path]) > 0:
        pytest.skip("this file system keeps everything in memory")
    with open(path, "rb") as file:
        file.read()
    assert page_cache.cached_share([path]) == 1
    assert page_cache.cached_share([]) == 0


def speed_with(cached_before: float | None, cold: bool, direct: bool) -> ReadingSpeed:
    return ReadingSpeed(
        seconds=2.0, samples=4, tokens=100_000, bytes_per_token=20_000, p50_ms=1, p99_ms=2, with_teacher=False,
        cold=cold, cached_before=cached_before, cached_after=1.0, direct=direct, whole_store=False,
        gpu_tokens_per_s=20_000,
    )  # fmt: skip


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("cached_before", "cold", "words"),
    [
        (0.0, False, "speed of the disk"),
        (0.0, True, "speed of the disk"),
        (0.9, False, "--cold drops"),
        (0.9, True, "--cold cannot drop"),
        (None, True, "somebody else"),
    ],
)
def test_the_report_never_passes_memory_off_as_the_disk(
    cached_before: float | None, cold: bool, words: str, direct: bool
) -> None:
    lines = report_lines(speed_with(cached_before, cold, direct))
    assert words in lines[-1]
    assert ("go past it" in lines[-1]) == direct
    assert "50.0 Ktok/s, 1.00 GB/s" in lines[1]
    assert "feeds       2.5 GPUs" in lines[3]


def test_the_command_prints_lines_and_json(tmp_path: Path) -> None:
    path = str(made(tmp_path / "s").path)
    shown = CliRunner().invoke(main, ["bench", path, "--seconds", "5", "--threads", "2", "--cold"])
    assert shown.exit_code == 0, shown.output
    assert "the whole store" in shown.output and "GPUs" in shown.output
    found = json.loads(CliRunner().invoke(main, ["bench", path, "--json"]).output)
    assert found["with_teacher"] is False
    assert found["samples"] == len(LENGTHS)
    assert np.isclose(found["gpus"], found["tokens_per_s"] / 20_000)
    path = str(made(tmp_path / "t", teacher="topk:3").path)
    for more, expected in ([], True), (["--no-teacher"], False):
        found = json.loads(CliRunner().invoke(main, ["bench", path, "--json", *more]).output)
        assert found["with_teacher"] is expected
