"""Rows per chunk: chosen from the lengths, obeyed when given, and always those of a store that exists."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from precompute_cases import SMALL_SHARD_BYTES, directory_bytes, make_precompute_config, write_jsonl

from cache_tools.errors import ConfigError, StoreError
from cache_tools.reader import Store
from precompute.cli import main
from precompute.config import PrecomputeConfig
from precompute.planning import plan
from precompute.repair import repair
from precompute.reporting import plan_report
from precompute.run import run

LENGTHS = {"short": [20, 50, 60, 64, 90, 17], "even": [32, 64, 96, 128], "long": [254, 255, 256, 250, 192, 128]}


@pytest.fixture(autouse=True)
def shards_of_a_few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.planning._MB", 4 * SMALL_SHARD_BYTES)


def rows_of(folder: Path, lengths: list[int]) -> Path:
    rows = [{"input_ids": [i % 7 for i in range(n)], "loss_mask": [0] + [1] * (n - 1)} for n in lengths]
    return write_jsonl(folder / "rows.jsonl", rows)


@pytest.mark.parametrize(("name", "chunk_rows"), [("short", 16), ("even", 32), ("long", 64)])
@pytest.mark.parametrize("codec", ["bf16", "raw", "int8", "fp8", "int4"])
def test_the_plan_chooses_from_lengths_and_codec_and_counts_the_padding(
    name: str, chunk_rows: int, codec: Any, target: Path, tmp_path: Path
) -> None:
    lengths = LENGTHS[name]
    config = make_precompute_config(target, rows_of(tmp_path, lengths), codec=codec, chunk_rows=None)
    planned = plan(config)
    found = planned.manifest.layout.chunk_rows
    assert found == (64 if codec == "bf16" else chunk_rows)
    assert plan(config).manifest == planned.manifest
    report = plan_report(planned, None)
    assert report["chunk_rows"] == found
    num_rows = sum(-(-length // found) * found for length in lengths)
    assert report["padding_share"] == pytest.approx(num_rows / sum(lengths) - 1, abs=1e-6)
    if codec == "raw":
        assert report["bytes_per_token"]["expected"] == round(2 * 32 * 2 * num_rows / sum(lengths), 1)
    explicit = plan(dataclasses.replace(config, chunk_rows=8))
    assert explicit.manifest.layout.chunk_rows == 8
    with pytest.raises(ConfigError, match="chunk_rows must be at least 1"):
        dataclasses.replace(config, chunk_rows=0)


def test_bytes_allowed_choose_samples_and_never_another_layout(target: Path, tmp_path: Path) -> None:
    lengths = [16] * 3 + [97] * 40
    config = make_precompute_config(target, rows_of(tmp_path, lengths), codec="raw", chunk_rows=None)
    largest = plan_report(plan(config), None)["largest_bytes"]
    kept: list[set[int]] = []
    for share in (0.7, 0.8, 0.9, 1.1):
        planned = plan(dataclasses.replace(config, max_bytes=str(int(largest * share))))
        assert planned.manifest.layout.chunk_rows == 16
        kept.append(set(planned.tokenised.samples.row.tolist()))
    assert kept[0] < kept[1] < kept[2] < kept[3] == set(range(43))


@pytest.mark.parametrize("chosen", [None, 8])
def test_resume_and_repair_keep_the_layout_of_the_store_and_refuse_another(
    chosen: int | None, target: Path, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    config = make_precompute_config(target, rows_of(tmp_path, LENGTHS["short"]), path, codec="int8", chunk_rows=chosen)
    run(config)
    before, layout = directory_bytes(path), Store.open(path).manifest.layout
    assert layout.chunk_rows == (chosen or 16) and layout.num_shards > 1
    (path / "sealed/1.json").unlink()
    default = dataclasses.replace(config, chunk_rows=None)
    assert run(default).computed_shards == 1
    (path / "tokens/input_ids/c/0").write_bytes(b"")
    (path / "hidden/0/codes/c/1/0").unlink()
    assert repair(default).damaged == ["hidden/0/codes/c/1/0", "tokens/input_ids/c/0"]
    assert directory_bytes(path) == before
    assert run(dataclasses.replace(config, chunk_rows=layout.chunk_rows)).computed_shards == 0
    for command in (run, repair):
        with pytest.raises(StoreError, match=rf"layout\.chunk_rows: {layout.chunk_rows} in the store, 64 now"):
            command(dataclasses.replace(config, chunk_rows=64))


def test_the_command_says_bytes_per_token_with_padding_for_the_layout_that_the_store_has(
    target: Path, tmp_path: Path
) -> None:
    def arguments(config: PrecomputeConfig, *more: str) -> list[str]:
        return ["plan", "--target", str(target), "--data", str(config.data[0]), "--layer-ids", "0,2", *more]

    config = make_precompute_config(target, rows_of(tmp_path, LENGTHS["short"]))
    shown = CliRunner().invoke(main, arguments(config, "--codec", "int8"))
    assert "16.9% padding included (chunks of 16 rows)" in shown.stdout, shown.output
    shown = CliRunner().invoke(main, arguments(config))
    assert "padding is compressed away (chunks of 64 rows)" in shown.stdout, shown.output
    store = ["--codec", "raw", "--store", str(tmp_path / "store"), "--json"]
    made = json.loads(CliRunner().invoke(main, arguments(config, *store, "--chunk-rows", "4")).stdout)
    assert made["chunk_rows"] == 4
    again = json.loads(CliRunner().invoke(main, arguments(config, *store)).stdout)
    assert {name: value for name, value in again.items() if name not in ("free_bytes", "fits")} == {
        name: value for name, value in made.items() if name not in ("free_bytes", "fits")
    }
