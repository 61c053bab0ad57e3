"""The same rows come out of every kind of file, in order, and nothing is lost without a reason."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from precompute_cases import chats, write_jsonl

from cache_tools.errors import ConfigError, DataError
from precompute.conversations import find_sources, read_rows

ROWS = chats(7)


def rows_of(*paths: Path) -> list[Any]:
    return [row.value for index, source in enumerate(find_sources(paths)) for row in read_rows(index, source)]


def save_arrow_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def save_dataset(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A folder as `datasets.Dataset.save_to_disk` writes it, its files numbered against the alphabet."""
    folder.mkdir()
    save_arrow_stream(folder / "data-b.arrow", rows[:4])
    save_arrow_stream(folder / "data-a.arrow", rows[4:])
    state = {"_data_files": [{"filename": "data-b.arrow"}, {"filename": "data-a.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_as(kind: str, folder: Path) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        write_jsonl(path, ROWS)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=3)
    elif kind == "arrow":
        save_arrow_stream(path, ROWS)
    else:
        path = save_dataset(folder / "dataset", ROWS)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet", "arrow", "dataset"])
def test_every_kind_of_file_gives_the_same_rows_in_order(kind: str, tmp_path: Path) -> None:
    assert rows_of(write_as(kind, tmp_path)) == ROWS


def test_arrow_files_of_the_file_format_are_read_too(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    assert rows_of(tmp_path / "x.arrow") == ROWS


def test_an_object_with_one_array_is_its_rows(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    assert rows_of(tmp_path / "x.json") == ROWS


def test_bad_lines_have_a_reason_and_their_line_number(tmp_path: Path) -> None:
    lines = [b'{"a": 1}', b"{broken", b"", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"a": 2}']
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    (source,) = find_sources((tmp_path / "x.jsonl",))
    rows = list(read_rows(0, source))
    assert [(row.number, row.value, row.problem) for row in rows] == [
        (0, {"a": 1}, None),
        (1, None, "not valid JSON"),
        (3, None, "row is not an object"),
        (4, None, "row is not an object"),
        (5, None, "not valid JSON"),
        (6, None, "not valid JSON"),
        (7, {"a": 2}, None),
    ]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet", "arrow"])
def test_positions_ascend_to_the_size_of_the_file(kind: str, tmp_path: Path) -> None:
    path = write_as(kind, tmp_path)
    (source,) = find_sources((path,))
    positions = [row.position for row in read_rows(0, source)]
    assert positions == sorted(positions)
    assert 0 < positions[-1] <= path.stat().st_size


def test_files_of_a_folder_come_in_the_order_of_their_names_however_they_were_made(tmp_path: Path) -> None:
    for order in (("b.jsonl", "a.jsonl", "c/d.jsonl"), ("c/d.jsonl", "a.jsonl", "b.jsonl")):
        folder = tmp_path / order[0][0] / "data"
        for name in order:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(folder / name, [{"text": name}])
        (folder / "notes.txt").write_text("not data")
        for hidden in (".cache/x.jsonl", "c/.e.jsonl", "c/.git/y.json"):
            (folder / hidden).parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(folder / hidden, [{"text": hidden}])
        assert [source.name for source in find_sources((folder,))] == [
            "data/a.jsonl", "data/b.jsonl", "data/c/d.jsonl",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.json", b"{broken"),
        ("x.json", b'{"a": [], "b": []}'),
        ("x.json", b"3"),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000)[:-20]),
        ("x.jsonl.gz", b"not gzip"),
        ("x.parquet", b"not parquet"),
        ("x.arrow", b"not arrow at all"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(tmp_path / name))):
        rows_of(tmp_path / name)


def test_paths_without_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        find_sources((tmp_path / "nothing.jsonl",))
    with pytest.raises(ConfigError, match="no data files"):
        find_sources((tmp_path,))
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(ConfigError, match="unknown kind"):
        find_sources((tmp_path / "x.csv",))


def test_a_dictionary_of_splits_is_refused_and_names_them(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    save_dataset(tmp_path / "train", ROWS)
    with pytest.raises(ConfigError, match=r"--data .*train"):
        find_sources((tmp_path,))


def test_values_that_python_cannot_hold_spoil_only_their_own_row(tmp_path: Path) -> None:
    lengths, characters = pa.py_buffer(np.array([0, 2, 4, 6], np.int32).tobytes()), pa.py_buffer(b"ab\xff\xfecd")
    texts = pa.Array.from_buffers(pa.string(), 3, [None, lengths, characters])
    times = pa.array([0, 0, 2**62], pa.timestamp("us"))
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": texts, "when": times}), path)
    rows = list(read_rows(0, find_sources((path,))[0]))
    assert [row.value is not None for row in rows] == [True, False, False]
    assert [row.number for row in rows] == [0, 1, 2]
    assert [row.problem for row in rows[1:]] == [
        "row holds a value that cannot be read: UnicodeDecodeError",
        "row holds a value that cannot be read: OverflowError",
    ]
