"""`--max-bytes`: a store that is smaller, complete, a fair choice of the data, and never larger than allowed."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from precompute_cases import chats, make_precompute_config, make_target, write_jsonl

from cache_tools.errors import ConfigError, StoreError
from cache_tools.integrity import verify
from cache_tools.reader import Store
from precompute.budget import samples_within
from precompute.cli import main
from precompute.config import parse_bytes
from precompute.planning import LEFT_OUT, plan
from precompute.reporting import plan_report
from precompute.run import run
from precompute.target import Target

NUM_ROWS = 60
DiskUsage = namedtuple("DiskUsage", "total used free")

pytestmark = pytest.mark.usefixtures("small_shards")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", [*chats(NUM_ROWS), {"messages": 1}])


def sources(path: Path) -> set[int]:
    return set(Store.open(path).samples.row.tolist())


@pytest.mark.parametrize(
    ("codec", "teacher"), [("bf16", "none"), ("raw", "hidden:all"), ("int8", "topk:5"), ("int4", "none")]
)
def test_the_store_is_complete_and_never_larger_even_if_nothing_compresses(
    codec: Any, teacher: str, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)

    def noise(self: Target, batch: Any) -> list[torch.Tensor]:
        """States whose bits are random, but finite, so that Blosc finds nothing to gain."""
        shape = (sum(map(len, batch)), 32)
        layers = [torch.randint(-(2**15), 2**15, shape, generator=random).to(torch.int16) for _ in (0, 2, 3)]
        return [(layer & ~0x4000).view(torch.bfloat16) for layer in layers]

    whole = make_precompute_config(target, data, codec=codec, teacher=teacher)
    largest = plan_report(plan(whole), None)["largest_bytes"]
    monkeypatch.setattr(Target, "hidden_states", noise)
    kept: list[set[int]] = []
    for share in (0.7, 0.9, 1.1):
        allowed, path = int(largest * share), tmp_path / str(share)
        run(make_precompute_config(target, data, path, codec=codec, teacher=teacher, max_bytes=str(allowed)))
        store = Store.open(path)
        assert store.complete and verify(path) == []
        assert store.bytes_on_disk() <= allowed
        kept.append(sources(path))
        left_out = NUM_ROWS - store.num_samples
        assert store.manifest.data.skipped.get(LEFT_OUT, 0) == left_out
        assert store.manifest.data.sources[0].num_samples == store.num_samples
        assert (left_out == 0) == (share > 1)
    assert kept[0] < kept[1] < kept[2]


@pytest.mark.parametrize("codec", ["bf16", "raw", "int8", "fp8", "int4"])
@pytest.mark.parametrize("teacher", ["none", "hidden", "hidden:all", "topk:8", "topk:400"])
def test_a_store_planned_for_the_free_bytes_is_never_refused_for_want_of_space(
    codec: Any, teacher: str, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"codec": codec, "teacher": teacher, "loss_on": "all"}
    free = int(plan_report(plan(make_precompute_config(target, data, **settings)), None)["largest_bytes"] * 0.8)
    planned = plan(make_precompute_config(target, data, **settings, max_bytes=str(free)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(free, 0, free))
    assert plan_report(planned, tmp_path)["fits"] is True


def test_what_is_not_compressed_fills_the_bytes_allowed(target: Path, data: Path, tmp_path: Path) -> None:
    """The bound is exact but for some kilobytes of metadata and of compressed columns and weights."""
    whole = make_precompute_config(target, data, codec="raw")
    largest = plan_report(plan(whole), None)["largest_bytes"]
    run(make_precompute_config(target, data, tmp_path / "s", codec="raw", max_bytes=str(largest)))
    assert largest - 90_000 < Store.open(tmp_path / "s").bytes_on_disk() <= largest


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_store_with_one_row_per_chunk_is_not_larger_either(
    codec: Any, target: Path, data: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"codec": codec, "chunk_rows": 1}
    largest = plan_report(plan(make_precompute_config(target, data, **settings)), None)["largest_bytes"]
    run(make_precompute_config(target, data, tmp_path / "s", **settings))
    assert Store.open(tmp_path / "s").bytes_on_disk() <= largest


def test_a_choice_is_the_largest_that_fits_and_spread_over_the_data() -> None:
    sizes = np.arange(1, 1001) % 17 + 1

    def size_of(indices: np.ndarray) -> int:
        return int(sizes[indices].sum())

    chosen = samples_within(1000, size_of, 4000)
    assert chosen is not None
    assert size_of(chosen) <= 4000 < size_of(chosen) + 18
    assert (np.diff(chosen) > 0).all()
    quarters = np.bincount(chosen // 250, minlength=4)
    assert quarters.min() > 0.7 * quarters.max()
    assert samples_within(1000, size_of, size_of(np.arange(1000))) is None


def test_too_few_bytes_for_one_sample_and_another_number_later_are_refused(
    target: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="not a single sample fits"):
        run(make_precompute_config(target, data, tmp_path / "s", max_bytes="10kB"))
    assert not (tmp_path / "s").exists()
    run(make_precompute_config(target, data, tmp_path / "s", max_bytes="300kB"))
    for other in ("1GB", None):
        with pytest.raises(StoreError, match=r"data\.settings\.max_bytes: 300000 in the store"):
            run(make_precompute_config(target, data, tmp_path / "s", max_bytes=other))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("2000000", 2_000_000), ("2.5kB", 2500), ("500GB", 5 * 10**11), ("1.5 TB", 15 * 10**11), ("2KiB", 2048)],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected
    for wrong in ("", "GB", "-1", "0", "5XB", "1e9", "five"):
        with pytest.raises(ConfigError, match="not a number of bytes"):
            parse_bytes(wrong)


def test_plan_says_how_much_is_left_out_and_how_large_the_store_gets_at_most(
    target: Path, data: Path, tmp_path: Path
) -> None:
    command = ["plan", "--target", str(target), "--data", str(data), "--layer-ids", "0,2", "--max-bytes", "400kB"]
    command += ["--chunk-rows", "8", "--max-length", "256"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    report = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    left_out = report["skipped"][LEFT_OUT]
    assert left_out == NUM_ROWS - report["samples"] > 0
    assert report["largest_bytes"] <= 400_000
    assert f"{left_out} x {LEFT_OUT}" in result.stdout
    assert "at most 3" in result.stdout
