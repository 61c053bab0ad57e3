"""Writing: bytes by an independent parser, the same bytes however the work was split or killed, clear refusals."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
from numpy.typing import NDArray

from cache_tools.arrays import ArraySpec
from cache_tools.codecs import bf16_to_float32, content_id
from cache_tools.errors import DataError, StoreError
from cache_tools.integrity import verify
from cache_tools.layer_statistics import STATISTICS_STRIDE
from cache_tools.layout import plan_layout
from cache_tools.manifest import Manifest
from cache_tools.reader import Store
from cache_tools.shards import ShardAppender
from cache_tools.synthetic import (
    make_files,
    make_manifest,
    make_store,
    sample_states,
    sample_tokens,
    write_shard,
)
from cache_tools.writer import SampleColumns, ShardWriter, Tokens, bind_engine, create_store, write_target

LENGTHS = [5, 17, 30, 8, 9, 31, 2, 12, 16]


def tree(path: Path) -> dict[str, str]:
    """Hash of every file by relative path."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def plan_store(path: Path) -> Manifest:
    """A planned store without hidden states; returns the manifest to bind."""
    return make_store(path, LENGTHS, shards=()).manifest


def parse_shard(content: bytes, num_chunks: int, chunk_shape: tuple[int, int], compressed: bool) -> NDArray[np.uint16]:
    """Rows of a shard file, from the text of the Zarr v3 sharding specification alone."""
    index = np.frombuffer(content[-(16 * num_chunks + 4) : -4], dtype="<u8").reshape(num_chunks, 2).tolist()
    rows = []
    for offset, num_bytes in index:
        if offset == num_bytes == 2**64 - 1:
            rows.append(np.zeros(chunk_shape, dtype=np.uint16))
            continue
        chunk = content[offset : offset + num_bytes - 4]
        plain = numcodecs.Blosc().decode(chunk) if compressed else chunk
        rows.append(np.frombuffer(plain, dtype="<u2").reshape(chunk_shape))
    return np.concatenate(rows)


@pytest.mark.parametrize("codec", ["bf16", "raw"])
def test_shard_bytes_hold_each_sample_at_its_rows_and_zeros_elsewhere(tmp_path: Path, codec: str) -> None:
    store = make_store(tmp_path / "s", LENGTHS, codec="raw" if codec == "raw" else "bf16", rejected=(3,))
    layout = store.manifest.layout
    for i, layer in enumerate(store.layer_ids):
        expected = np.zeros((store.num_shards * layout.shard_rows, 16), dtype=np.uint16)
        for sample in set(range(store.num_samples)) - {3}:
            start, length = int(store.samples.start[sample]), int(store.samples.length[sample])
            expected[start : start + length] = sample_states(length, 16, 2, 0, sample)[:, i]
        found = [
            parse_shard(
                (store.path / f"hidden/{layer}/bits/c/{shard}/0").read_bytes(),
                layout.shard_rows // layout.chunk_rows,
                (layout.chunk_rows, 16),
                codec == "bf16",
            )
            for shard in range(store.num_shards)
        ]
        np.testing.assert_array_equal(np.concatenate(found), expected)


def test_seal_counts_and_statistics_are_those_of_the_shard(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", LENGTHS, rejected=(1,))
    seal = json.loads((store.path / "sealed/0.json").read_text())
    samples = store.shard_samples(0)
    assert seal["samples"] == [samples.start, samples.stop]
    assert seal["rejected"] == [{"sample": 1, "layer": 1, "reason": "NaN or Inf at token 0"}]
    kept = [sample for sample in samples if sample != 1]
    assert seal["tokens"] == sum(int(store.samples.length[sample]) for sample in kept)
    for i, layer in enumerate(store.layer_ids):
        states = [sample_states(int(store.samples.length[s]), 16, 2, 0, s)[1::STATISTICS_STRIDE, i] for s in kept]
        values = bf16_to_float32(np.concatenate(states)).astype(np.float64)
        assert seal["layers"][str(layer)]["rms"] == pytest.approx(float(np.sqrt((values**2).mean())), rel=1e-5)
        assert seal["layers"][str(layer)]["abs_max"] == np.abs(values).max()


def test_statistics_of_the_largest_finite_values_are_finite(tmp_path: Path) -> None:
    manifest = plan_store(tmp_path / "s")
    with ShardWriter(tmp_path / "s", manifest, 2) as writer:
        lengths = Store.open(tmp_path / "s").samples.length
        for sample in writer.samples:
            states = np.full((int(lengths[sample]), 16), 0xFF7F, dtype=np.uint16)
            writer.append(sample, {1: states, 3: states})
        writer.seal()
    seal = json.loads((tmp_path / "s/sealed/2.json").read_text())
    assert seal["layers"]["1"]["abs_max"] == float(bf16_to_float32(np.array([0x7F7F], dtype=np.uint16))[0])
    assert seal["layers"]["1"]["rms"] == pytest.approx(seal["layers"]["1"]["abs_max"], rel=1e-5)


def test_sample_table_is_what_the_token_rows_say(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", LENGTHS)
    layout = plan_layout(np.array(LENGTHS), chunk_rows=8, shard_rows=store.manifest.layout.shard_rows)
    np.testing.assert_array_equal(store.samples.start, layout.start)
    np.testing.assert_array_equal(store.samples.row, layout.order)
    for sample in range(store.num_samples):
        ids, mask = sample_tokens(int(layout.length[sample]), 64, 0, sample)
        assert store.samples.supervised[sample] == mask.sum()
        assert store.samples.content_id[sample].tobytes() == content_id(ids, mask)


def test_equal_input_gives_equal_bytes_in_any_order_of_shards(tmp_path: Path) -> None:
    first = make_store(tmp_path / "a", LENGTHS, rejected=(2,))
    manifest = plan_store(tmp_path / "b")
    for shard in reversed(range(first.num_shards)):
        write_shard(tmp_path / "b", manifest, shard, rejected=(2,))
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


@pytest.mark.parametrize("codec", ["bf16", "raw", "int4"])
def test_threads_write_the_same_bytes_as_one(tmp_path: Path, codec: Any) -> None:
    options: dict[str, Any] = {"codec": codec, "hidden_size": 32, "layer_ids": (0, 2, 3, 4), "teacher": "topk:3"}
    one = make_store(tmp_path / "one", LENGTHS, rejected=(2,), **options)
    two = make_store(tmp_path / "two", LENGTHS, shards=(), **options)
    with ThreadPoolExecutor(3) as pool:
        for shard in range(two.num_shards):
            write_shard(two.path, two.manifest, shard, rejected=(2,), pool=pool)
    assert tree(one.path) == tree(two.path)


def test_a_full_disk_under_one_of_several_threads_is_the_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = plan_store(tmp_path / "s")
    before = tree(tmp_path / "s")
    real = ShardAppender.write

    def full(self: ShardAppender, row: int, values: Any) -> None:
        if "/3/" in str(self._path) and row >= 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, row, values)

    monkeypatch.setattr(ShardAppender, "write", full)
    with ThreadPoolExecutor(3) as pool, pytest.raises(StoreError, match="free space"):
        write_shard(tmp_path / "s", manifest, 1, pool=pool)
    assert tree(tmp_path / "s") == before


def write_some(path: Path, shards: list[int]) -> None:
    for shard in shards:
        write_shard(path, Store.open(path).manifest, shard)


def test_processes_writing_different_shards_do_not_disturb_each_other(tmp_path: Path) -> None:
    make_store(tmp_path / "a", LENGTHS)
    plan_store(tmp_path / "b")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=write_some, args=(tmp_path / "b", part)) for part in ([0, 2, 4], [1, 3, 5])]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def write_and_die(path: Path, num_flushes: int) -> None:
    """Writes all shards, but is killed when it flushes a file to disk for the given time."""
    left = num_flushes
    real = os.fsync

    def fsync(fd: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(fd)

    os.fsync = fsync
    store = Store.open(path)
    for shard in sorted(set(range(store.num_shards)) - store.sealed):
        write_shard(path, store.manifest, shard, rejected=(2,))


def test_a_writer_killed_at_any_flush_leaves_a_store_that_is_finished_to_the_same_bytes(tmp_path: Path) -> None:
    whole = tree(make_store(tmp_path / "whole", LENGTHS, rejected=(2,)).path)
    path = tmp_path / "killed"
    manifest = plan_store(path)
    context = multiprocessing.get_context("fork")
    for num_flushes in range(14):
        worker = context.Process(target=write_and_die, args=(path, num_flushes))
        worker.start()
        worker.join()
        store = Store.open(path)  # never broken, and what it calls sealed can be read
        for shard in store.sealed:
            for sample in set(store.shard_samples(shard)) - store.rejected:
                store.read_hidden(sample)
        if len(store.sealed) > 2:
            break
    for shard in sorted(set(range(store.num_shards)) - store.sealed):
        write_shard(path, manifest, shard, rejected=(2,))
    assert tree(path) == whole


def test_leaving_by_exception_or_without_sealing_leaves_nothing(tmp_path: Path) -> None:
    manifest = plan_store(tmp_path / "s")
    before = tree(tmp_path / "s")

    def interrupted() -> None:
        with ShardWriter(tmp_path / "s", manifest, 1) as writer:
            first = writer.samples.start
            states = sample_states(int(Store.open(tmp_path / "s").samples.length[first]), 16, 2, 0, first)
            writer.append(first, {1: states[:, 0], 3: states[:, 1]})
            assert any(".tmp-" in name for name in tree(tmp_path / "s"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with ShardWriter(tmp_path / "s", manifest, 1):
        pass
    assert tree(tmp_path / "s") == before


def test_temporaries_of_a_dead_writer_go_when_their_shard_is_written_again_and_only_then(tmp_path: Path) -> None:
    manifest = plan_store(tmp_path / "s")
    mine = tmp_path / "s/hidden/1/bits/c/1/.tmp-999999-0"
    others = tmp_path / "s/hidden/1/bits/c/2/.tmp-999999-0"
    for file in (mine, others):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"half")
    (tmp_path / "s/rejected").mkdir()
    (tmp_path / "s/rejected/1.json").write_bytes(b"of a run in which other samples were rejected")
    write_shard(tmp_path / "s", manifest, 1)
    assert not mine.exists()
    assert others.exists()
    assert not (tmp_path / "s/rejected/1.json").exists()


def test_appending_holds_one_chunk_in_memory_not_the_shard(tmp_path: Path) -> None:
    chunk_bytes = 64 * 512 * 2
    array = ArraySpec("hidden/0/bits", "uint16", (64 * 100, 512), 64, 64 * 100, compressed=False)
    rows = np.ones((64, 512), dtype=np.uint16)
    appender = ShardAppender(tmp_path, array, 0)
    tracemalloc.start()
    for chunk in range(100):
        appender.write(chunk * 64, rows)
    record = appender.finish()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert record.num_bytes > 100 * chunk_bytes
    assert peak < 6 * chunk_bytes


def test_samples_out_of_order_of_another_shard_or_shape_are_refused(tmp_path: Path) -> None:
    manifest = plan_store(tmp_path / "s")
    with ShardWriter(tmp_path / "s", manifest, 0) as writer:
        with pytest.raises(AssertionError, match="comes where"):
            writer.reject(1, 1, "all zero")
        with pytest.raises(AssertionError, match="not"):
            writer.append(0, {1: np.ones((1, 16), np.uint16), 3: np.ones((1, 16), np.uint16)})
        with pytest.raises(AssertionError, match="missing"):
            writer.seal()


def test_a_sealed_shard_is_not_written_again(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", LENGTHS)
    with pytest.raises(StoreError, match="shard 0 is complete"):
        ShardWriter(store.path, store.manifest, 0)


def test_a_full_disk_is_an_error_with_path_and_remedy_and_the_store_stays_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(tmp_path / "whole", LENGTHS)
    manifest = plan_store(tmp_path / "s")
    before = tree(tmp_path / "s")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="free space") as caught:
            write_shard(tmp_path / "s", manifest, 0)
    assert str(tmp_path / "s") in str(caught.value)
    assert tree(tmp_path / "s") == before
    write_some(tmp_path / "s", list(range(Store.open(tmp_path / "s").num_shards)))
    assert tree(tmp_path / "s") == tree(tmp_path / "whole")


def planned(path: Path, tokens: Iterator[Tokens]) -> None:
    """Plans a store of three samples whose tokens come from `tokens`."""
    layout = plan_layout(np.array([4, 6, 9]), chunk_rows=4, shard_rows=16)
    manifest = make_manifest(layout, hidden_size=8, layer_ids=(1,), num_layers=4, vocab_size=64, codec="raw")
    columns = SampleColumns(np.zeros(3, dtype=np.int32), layout.order)
    create_store(path, manifest, layout, columns, tokens, make_files(64))


def test_planning_that_fails_leaves_nothing_and_a_dead_planner_is_cleaned_up(tmp_path: Path) -> None:
    def tokens(failure: Exception | None = None) -> Iterator[Tokens]:
        for length in (4, 6, 9):
            yield sample_tokens(length, 64, 0, 0)
            if failure is not None:
                raise failure

    abandoned = tmp_path / ".tmp-999999-s"
    (abandoned / "tokens").mkdir(parents=True)
    users = tmp_path / "s.tmp-999999"
    users.mkdir()
    with pytest.raises(DataError, match="input data"):
        planned(tmp_path / "s", tokens(OSError(errno.EIO, "Input/output error")))
    assert sorted(os.listdir(tmp_path)) == ["s.tmp-999999"]
    with pytest.raises(KeyError):
        planned(tmp_path / "s", tokens(KeyError("a bug")))
    assert sorted(os.listdir(tmp_path)) == ["s.tmp-999999"]
    planned(tmp_path / "s", tokens())
    assert sorted(os.listdir(tmp_path)) == ["s", "s.tmp-999999"]
    with pytest.raises(StoreError, match="at the path of the new store"):
        planned(tmp_path / "s", tokens())


def test_a_planner_at_work_is_left_alone_and_a_second_one_is_refused(tmp_path: Path) -> None:
    def tokens() -> Iterator[Tokens]:
        for length in (4, 6, 9):
            with pytest.raises(StoreError, match="another command is planning this store"):
                planned(tmp_path / "s", iter([]))
            yield sample_tokens(length, 64, 0, 0)

    planned(tmp_path / "s", tokens())
    assert os.listdir(tmp_path) == ["s"]
    assert verify(tmp_path / "s") == []


def test_binding_happens_once_and_names_every_field_that_differs(tmp_path: Path) -> None:
    manifest = plan_store(tmp_path / "s")
    before = tree(tmp_path / "s")
    bind_engine(tmp_path / "s", manifest)
    assert tree(tmp_path / "s") == before
    assert manifest.engine is not None
    engine = dataclasses.replace(manifest.engine, batch_tokens=7)
    target = dataclasses.replace(manifest.target, weights_sha256="other")
    with pytest.raises(StoreError) as caught:
        bind_engine(tmp_path / "s", dataclasses.replace(manifest, engine=engine, target=target))
    assert re.search(r"engine\.batch_tokens: 1024 .* 7 now", str(caught.value))
    assert "target.weights_sha256" in str(caught.value)
    assert tree(tmp_path / "s") == before


def test_binding_an_unbound_store_to_another_plan_is_refused(tmp_path: Path) -> None:
    planned(tmp_path / "s", iter([sample_tokens(n, 64, 0, 0) for n in (4, 6, 9)]))
    manifest = Store.open(tmp_path / "s").manifest
    with pytest.raises(StoreError, match="tokenizer_sha256"):
        bind_engine(tmp_path / "s", dataclasses.replace(manifest, tokenizer_sha256="other"))


def test_target_weights_of_a_writer_that_died_are_written_again(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", LENGTHS, tied=False)
    whole = tree(store.path)
    arrays = {name: store.target_array(name) for name in ("embed_tokens", "final_norm", "lm_head")}
    (store.path / "sealed/target.json").unlink()
    (store.path / "target/lm_head/bits/c/0/0").write_bytes(b"half")
    (store.path / "target/lm_head/bits/c/0/.tmp-999999-0").write_bytes(b"half")
    write_target(store.path, arrays, store.target_attributes)
    assert tree(store.path) == whole
    write_target(store.path, arrays, store.target_attributes)
    assert tree(store.path) == whole
    shutil.rmtree(store.path)
