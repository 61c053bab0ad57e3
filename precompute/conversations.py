"""Reading rows from conversation files, one at a time, in a fixed order.

A row that cannot be read is yielded with a reason instead of a value; it is never dropped and never raises. Only a
file that cannot be read at all raises.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_tools.errors import ConfigError, DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow")
_FOLDER_METADATA = {"state.json", "dataset_info.json", "dataset_dict.json"}
_ARROW_BATCH_ROWS = 512


@dataclass(frozen=True)
class SourceFile:
    """One input file. `name` starts at the path the user gave, so it survives moving the data."""

    name: str
    path: Path


@dataclass(frozen=True)
class RawRow:
    """One record of a source. Exactly one of `value` and `problem` is set."""

    source: int  # index into the list of sources
    number: int  # 0-based record number in the source (line number for JSON lines)
    position: int  # bytes of the file read so far, roughly; for progress only
    value: dict[str, Any] | None
    problem: str | None = None


@dataclass(frozen=True)
class _Unreadable:
    reason: str


_Record = tuple[int, int, Any]  # record number, bytes of the file read so far, the record


def find_sources(paths: tuple[Path, ...]) -> list[SourceFile]:
    """The files behind the given files and folders; a folder's files are sorted by name, hidden ones left out.

    Raises ConfigError for paths that do not exist, hold no readable file, or are a dictionary of splits.
    """
    sources: list[SourceFile] = []
    for path in paths:
        if path.is_dir():
            sources += _folder_sources(path)
        elif path.is_file():
            if not path.name.endswith(SUFFIXES):
                raise ConfigError(
                    "unknown kind of data file", where=path, expected=f"a name ending in {', '.join(SUFFIXES)}"
                )
            sources.append(SourceFile(path.name, path))
        else:
            raise ConfigError("data path does not exist", where=path)
    return sources


def read_rows(source_index: int, source: SourceFile) -> Iterator[RawRow]:
    """The records of one file, in file order. Raises DataError if the file itself cannot be read."""
    path = source.path
    try:
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            records = _json_lines(path)
        elif path.suffix == ".json":
            records = _json_records(path)
        else:
            records = _arrow_records(path)
        for number, position, record in records:
            if isinstance(record, dict):
                yield RawRow(source_index, number, position, record)
            else:
                problem = record.reason if isinstance(record, _Unreadable) else "row is not an object"
                yield RawRow(source_index, number, position, None, problem)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("a data file cannot be read", where=source.path, got=error) from error


def _folder_sources(folder: Path) -> list[SourceFile]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in folder.iterdir() if child.is_dir())
        raise ConfigError(
            "this folder holds several splits of a data set",
            where=folder,
            got=", ".join(splits),
            fix=f"name the split, for example --data {folder / (splits[0] if splits else 'train')}",
        )
    if (folder / "state.json").is_file():
        files = _saved_dataset_files(folder)
    else:
        files = sorted(
            child
            for child in folder.rglob("*")
            if child.is_file()
            and child.name.endswith(SUFFIXES)
            and child.name not in _FOLDER_METADATA
            and not any(part.startswith(".") for part in child.relative_to(folder).parts)  # caches, checkpoints, .git
        )
    if not files:
        raise ConfigError(
            "no data files in this folder", where=folder, expected=f"names ending in {', '.join(SUFFIXES)}"
        )
    root = folder.resolve()
    return [SourceFile(f"{root.name}/{file.relative_to(folder).as_posix()}", file) for file in files]


def _saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a data set saved with `save_to_disk`, in the order of its rows."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "the folder looks like a saved data set but its state.json cannot be understood",
            where=folder / "state.json",
            got=repr(error),
        ) from error


def _json_lines(path: Path) -> Iterator[_Record]:
    with path.open("rb") as raw, gzip.open(raw, "rb") if path.suffix == ".gz" else raw as lines:
        position = 0
        for number, line in enumerate(lines):
            position = raw.tell() if path.suffix == ".gz" else position + len(line)
            if not line.strip():
                continue
            try:
                yield number, position, json.loads(line.decode("utf-8-sig" if number == 0 else "utf-8"))
            except (ValueError, RecursionError):
                yield number, position, _Unreadable("not valid JSON")


def _json_records(path: Path) -> Iterator[_Record]:
    """The rows of a JSON file: an array of rows, or an object with exactly one array in it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            "a data file is not valid JSON", where=path, got=error, fix="name it .jsonl if it has one row per line"
        ) from error
    if isinstance(document, dict):
        lists = {key: value for key, value in document.items() if isinstance(value, list)}
        if len(lists) != 1:
            raise DataError(
                "cannot tell which part of the JSON file holds the rows",
                where=path,
                got=f"an object with {len(lists)} arrays: {', '.join(lists) or 'none'}",
                expected="an array of rows, or an object with exactly one array",
            )
        document = next(iter(lists.values()))
    if not isinstance(document, list):
        raise DataError("a JSON data file must hold an array of rows", where=path, got=type(document).__name__)
    size = path.stat().st_size
    for number, record in enumerate(document):
        yield number, size * (number + 1) // len(document), record


def _arrow_records(path: Path) -> Iterator[_Record]:
    import pyarrow as pa

    number = 0
    try:
        for batch, position in _arrow_batches(path):
            for start in range(0, batch.num_rows, _ARROW_BATCH_ROWS):
                for record in _python_rows(batch.slice(start, _ARROW_BATCH_ROWS)):
                    yield number, position, record
                    number += 1
    except pa.ArrowException as error:
        raise DataError("a data file cannot be read", where=path, got=error) from error


def _python_rows(batch: Any) -> list[Any]:
    """The rows of a record batch. Broken Unicode and dates that Python cannot hold spoil only their own row."""
    try:
        rows: list[Any] = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [_Unreadable(f"row holds a value that cannot be read: {type(error).__name__}")]
        return [row for index in range(batch.num_rows) for row in _python_rows(batch.slice(index, 1))]
    return rows


def _arrow_batches(path: Path) -> Iterator[tuple[Any, int]]:
    """Record batches with the bytes of the file read so far."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = path.stat().st_size
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as parquet:
            num_read = 0
            for batch in parquet.iter_batches(batch_size=_ARROW_BATCH_ROWS):
                num_read += batch.num_rows
                yield batch, size * num_read // max(parquet.metadata.num_rows, 1)
        return
    with pa.memory_map(str(path)) as mapped:
        # `datasets` writes the stream format; other tools write the file format, which starts with a magic word.
        is_file_format = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        if is_file_format:
            reader = pa.ipc.open_file(mapped)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index), size * (index + 1) // reader.num_record_batches
        else:
            for batch in pa.ipc.open_stream(mapped):
                yield batch, mapped.tell()
