"""A plan needs no weights, counts every row, and refuses what cannot work before anything is written."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from precompute_cases import chat, chats, directory_bytes, make_precompute_config, make_target, write_jsonl

from cache_tools.codecs import content_id
from cache_tools.errors import ConfigError, DataError, StoreError, TargetError
from cache_tools.integrity import verify
from cache_tools.reader import Store
from precompute.cli import main
from precompute.config import PrecomputeConfig
from precompute.planning import plan
from precompute.reporting import plan_report, require_space
from precompute.run import write_plan
from precompute.samples import SampleBuffer
from precompute.tokenizing import Tokens

DiskUsage = namedtuple("DiskUsage", "total used free")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), weights=False)


def test_the_planned_store_holds_the_samples_and_says_where_each_came_from(target: Path, tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [*chats(9), {"text": "skipped"}, chat("hi", "hello")])
    second = write_jsonl(tmp_path / "b.jsonl", [chat("x", "second file")])
    config = PrecomputeConfig(target=target, data=(first, second), store=tmp_path / "s", layer_ids=(1, 3), chunk_rows=8)
    planned = plan(config)
    write_plan(planned, tmp_path / "s")
    store = Store.open(tmp_path / "s")
    assert store.num_samples == 11
    assert verify(store.path) == []
    data = planned.tokenised.samples
    found = set()
    for sample in range(store.num_samples):
        ids, mask = store.read_tokens(sample)
        source, row = int(store.samples.source[sample]), int(store.samples.row[sample])
        found.add((source, row))
        index = next(i for i in range(len(data)) if (data.source[i], data.row[i]) == (source, row))
        np.testing.assert_array_equal(ids, data.tokens(index)[0])
        np.testing.assert_array_equal(mask, data.tokens(index)[1].astype(bool))
    assert found == {*((0, row) for row in (*range(9), 10)), (1, 0)}
    assert [(s.name, s.num_rows, s.num_samples) for s in store.manifest.data.sources] == [
        ("a.jsonl", 11, 10), ("b.jsonl", 1, 1),
    ]  # fmt: skip


def test_skipped_rows_are_counted_and_listed_with_file_line_and_id(target: Path, tmp_path: Path) -> None:
    rows = [chat("a", "b"), {"text": "x", "id": 17}, {"messages": []}, chat("c", "d"), {"text": "y"}]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    with data.open("a") as file:
        file.write("{broken\n")
    planned = plan(make_precompute_config(target, data))
    report = plan_report(planned, None)
    assert sum(report["skipped"].values()) == 4
    text_reason = next(reason for reason in report["skipped"] if reason.startswith("plain text"))
    assert report["skipped_examples"][text_reason] == ["a.jsonl:2 (id 17)", "a.jsonl:5"]
    assert report["skipped_examples"]["not valid JSON"] == ["a.jsonl:6"]
    listed = [json.loads(line) for line in planned.files["skipped.jsonl"].splitlines()]
    assert [entry["where"] for entry in listed] == ["a.jsonl:2", "a.jsonl:3", "a.jsonl:5", "a.jsonl:6"]
    assert report["samples"] + sum(report["skipped"].values()) == report["sources"][0]["rows"]


def test_the_report_agrees_with_a_count_by_hand(target: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(n)), "loss_mask": [0] * (n - 2) + [1, 1]} for n in (10, 20, 30, 20)]
    config = make_precompute_config(target, write_jsonl(tmp_path / "a.jsonl", rows), codec="raw")
    report = plan_report(plan(config), tmp_path / "s")
    assert (report["samples"], report["tokens"], report["supervised"]) == (4, 80, 8)
    assert report["lengths"] == {"min": 10, "p10": 10, "p50": 20, "p90": 20, "p99": 20, "max": 30}
    assert report["duplicates"] == 1
    assert report["bytes_per_token"]["uncompressed"] == 2 * 32 * 2
    assert report["bytes"]["expected"] == (16 + 24 + 32 + 24) * 2 * 32 * 2
    assert report["fits"] is True


@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_a_disk_that_is_too_small_is_refused_with_both_numbers(
    codec: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", chats(5))
    planned = plan(make_precompute_config(target, data, codec=codec))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(10**6, 10**6 - 3000, 3000))
    with pytest.raises(StoreError, match="disk is too small") as caught:
        write_plan(planned, tmp_path / "s")
    assert "3.0 kB free" in str(caught.value)
    assert ("estimate" in str(caught.value)) == (codec == "bf16")
    assert "fewer samples (--limit)" in str(caught.value)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("codec", "lighter"), [("bf16", "int8 or int4"), ("raw", "int8 or int4"), ("fp8", "int4"), ("int4", None)]
)
def test_a_small_disk_names_every_way_to_a_smaller_store(
    codec: Any, lighter: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(10**9, 0, 2_999_999))
    for path, ways in ((tmp_path / "new", "--store, or plan a smaller store"), (tmp_path, "move the store")):
        with pytest.raises(StoreError) as caught:
            require_space(path, 3_000_000, codec)
        fix = str(caught.value.fix)
        assert fix.startswith("free space") and ways in fix and "--layer-ids" in fix and "--max-bytes 2MB" in fix
        assert (f"--codec {lighter}" in fix) if lighter else ("--codec" not in fix)
    require_space(tmp_path, 2_999_999, codec)


def test_data_without_any_sample_is_an_error_with_the_histogram(target: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        plan(make_precompute_config(target, write_jsonl(tmp_path / "empty.jsonl", [])))
    data = write_jsonl(tmp_path / "bad.jsonl", [{"text": "x"}, {"messages": []}, {"text": "y"}])
    with pytest.raises(DataError, match=r"every row was skipped") as caught:
        plan(make_precompute_config(target, data))
    assert "2 x plain text" in str(caught.value)
    assert "bad.jsonl:2" in str(caught.value)


def test_limit_keeps_the_first_usable_rows(target: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [chat("a", "b"), {"text": "x"}, *chats(5)])
    planned = plan(make_precompute_config(target, data, limit=3))
    assert planned.tokenised.samples.row.tolist() == [0, 2, 3]
    assert planned.manifest.data.sources[0].num_rows == 4


def test_two_plans_of_the_same_data_are_the_same_bytes(target: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [*chats(20), {"text": "x"}])
    config = make_precompute_config(target, data)
    for name in ("s1", "s2"):
        write_plan(plan(config), tmp_path / name)
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*")) for n in ("s1", "s2")]
    assert files[0] == files[1]
    for file in files[0]:
        if (tmp_path / "s1" / file).is_file():
            assert (tmp_path / "s1" / file).read_bytes() == (tmp_path / "s2" / file).read_bytes(), file


def test_layer_ids_must_be_layers_of_the_target(target: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", chats(2))
    for ids in ((0, 4), (2, 1), (1, 1), (-1, 2)):
        with pytest.raises(ConfigError, match="layer ids"):
            plan(make_precompute_config(target, data, layer_ids=ids))


def test_samples_longer_than_the_targets_positions_are_refused(target: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * 600, "loss_mask": [1] * 600}]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(TargetError, match="max_position_embeddings"):
        plan(make_precompute_config(target, data, max_length=1000))


def test_a_folder_that_is_no_target_is_a_target_error(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", chats(2))
    with pytest.raises(TargetError, match=r"config\.json"):
        plan(make_precompute_config(tmp_path, data))


def test_the_plan_command_prints_json_and_writes_the_store_without_weights(target: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", chats(4))
    arguments = ["plan", "--target", str(target), "--data", str(data), "--store", str(tmp_path / "s"), "--json"]
    options = ["--layer-ids", "0,2", "--max-length", "256"]
    result = CliRunner().invoke(main, [*arguments, *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples"] == 4
    assert Store.open(tmp_path / "s").manifest.target.weights_sha256 is None
    before = directory_bytes(tmp_path / "s")
    again = CliRunner().invoke(main, [*arguments, *options])
    assert again.exit_code == 0
    assert {**json.loads(again.stdout), "free_bytes": 0} == {**json.loads(result.stdout), "free_bytes": 0}
    other = CliRunner().invoke(main, [*arguments, "--layer-ids", "0,1", "--max-length", "256"])
    assert other.exit_code == 1
    assert "layer_ids" in other.stderr
    assert directory_bytes(tmp_path / "s") == before


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 64))
def test_a_sample_buffer_gives_back_what_was_added(lengths: list[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("precompute.samples._BLOCK_TOKENS", block)
        rng = np.random.default_rng(0)
        rows = [(rng.integers(0, 99, n, dtype=np.int32), rng.integers(0, 2, n, dtype=np.uint8)) for n in lengths]
        buffer = SampleBuffer()
        for number, (ids, mask) in enumerate(rows):
            buffer.add(Tokens(ids, mask), source=number % 3, row=2 * number)
    for number, (ids, mask) in enumerate(rows):
        np.testing.assert_array_equal(buffer.tokens(number)[0], ids)
        np.testing.assert_array_equal(buffer.tokens(number)[1], mask)
        assert bytes(buffer.content_id[number]) == content_id(ids, mask)
    assert buffer.length.tolist() == lengths
    assert buffer.supervised.tolist() == [int(mask.sum()) for _, mask in rows]
    assert buffer.source.tolist() == [n % 3 for n in range(len(rows))]
    assert buffer.row.tolist() == [2 * n for n in range(len(rows))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "tokenizer.json",
            '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": [5]}}',
        ),
        ("chat_template.jinja", "{{ 1 / 0 }}"),
        ("config.json", {"hidden_size": "many"}),
        ("config.json", {"hidden_size": 0}),
        ("config.json", {"num_attention_heads": 0}),
        ("tokenizer_config.json", {"chat_template": [{"name": "tool_use", "template": "x"}]}),
    ],
)
def test_damaged_files_of_the_target_are_a_target_error(
    name: str, content: str | dict[str, Any], tmp_path: Path
) -> None:
    folder = make_target(tmp_path / "target", weights=False)
    if isinstance(content, dict):
        if "chat_template" in content:
            (folder / "chat_template.jinja").unlink()
        content = json.dumps(json.loads((folder / name).read_text()) | content)
    (folder / name).write_text(content)
    with pytest.raises(TargetError, match=r"target") as caught:
        plan(make_precompute_config(folder, write_jsonl(tmp_path / "rows.jsonl", chats(2))))
    assert str(folder) in str(caught.value)


def test_ids_that_cannot_be_encoded_are_reported_escaped(target: Path, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [*chats(3), {"id": "\ud800", "text": "x"}])
    flags = ["--layer-ids", "0,2", "--device", "cpu"]
    result = CliRunner().invoke(main, ["plan", "--target", str(target), "--data", str(rows), *flags])
    assert result.exit_code == 0, result.output
    assert "rows.jsonl:4 (id \\ud800)" in result.stdout


def test_a_codec_or_teacher_that_does_not_fit_the_target_is_refused_before_any_row_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = make_target(tmp_path / "narrow", weights=False, hidden_size=48)
    data = write_jsonl(tmp_path / "rows.jsonl", chats(2))
    monkeypatch.setattr("precompute.planning.tokenise", None)
    with pytest.raises(ConfigError, match="int4 needs a hidden size"):
        plan(make_precompute_config(narrow, data, codec="int4"))
    with pytest.raises(ConfigError, match=r"vocabulary(.|\n)*got: --teacher topk:513(.|\n)*at most topk:512"):
        plan(make_precompute_config(narrow, data, teacher="topk:513"))
