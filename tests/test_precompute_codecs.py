"""The table of codecs from a target agrees with the one from its store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from precompute_cases import chats, make_precompute_config, make_target, write_jsonl

from cache_tools.codec_report import CodecComparison, choose_samples, planned_chunk_rows
from cache_tools.errors import ConfigError
from cache_tools.reader import Store
from precompute.cli import main
from precompute.codecs import compare_codecs
from precompute.config import CodecsConfig
from precompute.run import run


def test_a_target_gives_the_numbers_that_its_store_gives(tmp_path: Path) -> None:
    target, data = make_target(tmp_path / "target"), write_jsonl(tmp_path / "rows.jsonl", chats(12))
    report = compare_codecs(CodecsConfig(target=target, data=(data,), layer_ids=(0, 2), device="cpu"))
    run(make_precompute_config(target, data, tmp_path / "store", chunk_rows=64, batch_tokens=1))
    store = Store.open(tmp_path / "store")
    place = {int(row): sample for sample, row in enumerate(store.samples.row)}
    lengths = store.samples.length[[place[row] for row in range(12)]]
    calibration, measured = choose_samples(lengths, np.arange(12), "")
    comparison = CodecComparison(store.layer_ids, store.hidden_size, planned_chunk_rows(lengths))
    for row in calibration:
        comparison.calibrate(store.read_hidden(place[row]))
    for row in measured:
        comparison.measure(store.read_hidden(place[row]))
    assert report == comparison.report()


def test_the_command_writes_nothing_and_prints_json(tmp_path: Path) -> None:
    target, data = make_target(tmp_path / "target"), write_jsonl(tmp_path / "rows.jsonl", chats(4))
    before = sorted(tmp_path.rglob("*"))
    command = ["codecs", "--target", str(target), "--data", str(data), "--device", "cpu", "--json"]
    command += ["--layer-ids", "0", "--layer-ids", "2"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert [codec["codec"] for codec in facts["codecs"]] == ["bf16", "raw", "int8", "fp8", "int4"]
    assert sorted(tmp_path.rglob("*")) == before


def test_impossible_settings_are_refused_as_by_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="flash_attention_2 needs"):
        compare_codecs(CodecsConfig(target=tmp_path, data=(tmp_path,), dtype="float32", attention="flash_attention_2"))


def test_samples_of_one_token_again_and_again_are_measured(tmp_path: Path) -> None:
    rows = [{"input_ids": [token] * 6, "loss_mask": [1] * 6} for token in (7, 8)]
    target, data = make_target(tmp_path / "target"), write_jsonl(tmp_path / "rows.jsonl", rows)
    report = compare_codecs(CodecsConfig(target=target, data=(data,), layer_ids=(0, 2), device="cpu"))
    assert report.measured_tokens == report.calibration_tokens == 6
