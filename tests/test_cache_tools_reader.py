"""Reading: equal to zarr-python and tensorstore, lazy, safe with threads, forks and pickling, clear errors."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from numpy.typing import NDArray

from cache_tools.codec_names import Codec
from cache_tools.errors import CorruptError, StoreError
from cache_tools.layout import plan_layout
from cache_tools.manifest import TargetAttributes
from cache_tools.reader import Store
from cache_tools.synthetic import make_manifest, make_store, sample_states, sample_tokens, write_shard
from cache_tools.writer import SampleColumns, ShardWriter, create_store, write_target

LENGTHS = [5, 17, 30, 8, 9, 31, 2, 12, 16, 1, 40]
CODECS: list[Codec] = ["bf16", "raw"]


def by_zarr(path: Path, name: str) -> NDArray[Any]:
    array = zarr.open_group(path, mode="r", zarr_format=3)[name]
    assert isinstance(array, zarr.Array)
    return np.asarray(array[...])


def by_tensorstore(path: Path, name: str) -> NDArray[Any]:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / name)}}
    return np.asarray(tensorstore.open(spec, open=True, read=True).result().read().result())


@pytest.fixture(scope="module", params=CODECS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("reader") / "s.zarr"
    return make_store(path, LENGTHS, codec=request.param, rejected=(3,), tied=False, shard_rows=64)


@pytest.mark.parametrize("oracle", [by_zarr, by_tensorstore])
def test_other_zarr_implementations_read_the_same_tokens_and_hidden_states(store: Store, oracle: Any) -> None:
    ids, mask = oracle(store.path, "tokens/input_ids"), oracle(store.path, "tokens/loss_mask")
    hidden = {layer: oracle(store.path, f"hidden/{layer}/bits") for layer in store.layer_ids}
    assert ids.shape == mask.shape == (store.manifest.layout.num_rows,)
    used = np.zeros(len(ids), dtype=np.bool_)
    for sample in range(store.num_samples):
        rows = slice(int(store.samples.start[sample]), int(store.samples.start[sample] + store.samples.length[sample]))
        used[rows] = True
        np.testing.assert_array_equal(store.read_tokens(sample)[0], ids[rows])
        np.testing.assert_array_equal(store.read_tokens(sample)[1], mask[rows] == 1)
        if sample in store.rejected:
            assert all(not states[rows].any() for states in hidden.values())
            continue
        expected = np.stack([hidden[layer][rows] for layer in store.layer_ids], axis=1)
        np.testing.assert_array_equal(store.read_hidden(sample), expected)
        np.testing.assert_array_equal(expected, sample_states(len(expected), 16, 2, 0, sample))
    assert not ids[~used].any()
    assert not mask[~used].any()
    assert all(not states[~used].any() for states in hidden.values())


@pytest.mark.parametrize("oracle", [by_zarr, by_tensorstore])
def test_other_zarr_implementations_read_the_same_sample_table_and_weights(store: Store, oracle: Any) -> None:
    for name in ("start", "length", "supervised", "source", "row", "content_id"):
        np.testing.assert_array_equal(getattr(store.samples, name), oracle(store.path, f"samples/{name}"))
    for name in ("embed_tokens", "lm_head", "final_norm"):
        np.testing.assert_array_equal(store.target_array(name), oracle(store.path, f"target/{name}/bits"))


def test_attributes_say_what_the_numbers_mean(store: Store) -> None:
    group = zarr.open_group(store.path, mode="r", zarr_format=3)
    assert group.attrs["dflash"] == store.manifest.to_dict()
    array = group["hidden/3/bits"]
    assert array.attrs["dtype"] == "bfloat16 bit patterns"
    assert array.attrs["layer_id"] == 3
    assert dict(group["target"].attrs) == store.target_attributes.to_dict()


def test_layers_are_chosen_and_ordered_by_the_caller_and_fill_a_given_buffer(store: Store) -> None:
    whole = store.read_hidden(6)
    np.testing.assert_array_equal(store.read_hidden(6, [3]), whole[:, 1:])
    np.testing.assert_array_equal(store.read_hidden(6, [3, 1]), whole[:, ::-1])
    wide = np.full((len(whole) + 4, 5, 20), 7, dtype=np.uint16)
    out = wide[2:-2, 1:5:2, 3:19]
    assert store.read_hidden(6, out=out) is out
    np.testing.assert_array_equal(out, whole)
    out[...] = 7
    assert (wide == 7).all()


def test_opening_and_counting_reads_no_chunk(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", LENGTHS, rejected=(3,))
    for folder in [Path(found) for found, _, _ in os.walk(store.path) if found.endswith("/c")]:
        shutil.rmtree(folder)
    opened = Store.open(store.path)
    assert opened.num_samples == len(LENGTHS)
    assert opened.num_tokens == sum(LENGTHS)
    assert opened.complete
    assert opened.rejected == {3}


def test_the_sample_table_costs_bytes_per_sample_not_objects(tmp_path: Path) -> None:
    count = 20_000
    layout = plan_layout(np.full(count, 1), chunk_rows=1, shard_rows=count)
    manifest = make_manifest(layout, hidden_size=4, layer_ids=(0,), num_layers=2, vocab_size=8, codec="raw")
    columns = SampleColumns(np.zeros(count, dtype=np.int32), layout.order)
    one = sample_tokens(1, 8, 0, 0)
    create_store(tmp_path / "s", manifest, layout, columns, (one for _ in range(count)), {})
    Store.open(tmp_path / "s").samples.start  # noqa: B018 - imports and caches of libraries are not counted
    gc.collect()
    tracemalloc.start()
    table = Store.open(tmp_path / "s").samples
    assert table.start[-1] == count - 1
    assert table.length.sum() == table.supervised.sum() == count
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < count * (8 + 4 + 4) + 300_000


def test_threads_read_what_one_thread_reads(store: Store) -> None:
    samples = sorted(set(range(store.num_samples)) - store.rejected)
    expected = [store.read_hidden(sample) for sample in samples]
    fresh = Store.open(store.path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(fresh.read_hidden, samples * 20))
    for i, states in enumerate(found):
        np.testing.assert_array_equal(states, expected[i % len(samples)])


def check_sample(store: Store, sample: int, expected: NDArray[np.uint16]) -> None:
    np.testing.assert_array_equal(store.read_hidden(sample), expected)


@pytest.mark.parametrize("context", [multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")])
def test_a_used_store_works_in_forked_and_spawned_processes(store: Store, context: Any) -> None:
    expected = store.read_hidden(5)
    worker = context.Process(target=check_sample, args=(store, 5, expected))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    copied = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(copied.read_hidden(5), expected)


def test_a_reader_sees_a_shard_only_when_it_is_sealed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", LENGTHS, shards=(0,))
    assert store.sealed == {0}
    assert not store.complete
    with pytest.raises(StoreError, match=f"1 of {store.num_shards} shards"):
        store.require_complete()
    with ShardWriter(store.path, store.manifest, 1, store.samples) as writer:
        for sample in writer.samples:
            states = sample_states(int(store.samples.length[sample]), 16, 2, 0, sample)
            writer.append(sample, {1: states[:, 0], 3: states[:, 1]})
        during = Store.open(store.path)
        assert during.sealed == {0}
        with pytest.raises(StoreError, match="shard 1 is not sealed"):
            during.read_hidden(writer.samples.start)
        writer.seal()
    assert Store.open(store.path).sealed == {0, 1}
    assert store.sealed == {0}
    Store.open(store.path).read_hidden(writer.samples.start)
    for shard in range(2, store.num_shards):
        write_shard(store.path, store.manifest, shard)
    Store.open(store.path).require_complete()


def test_samples_and_layers_that_are_not_there_are_named(store: Store) -> None:
    for sample in (-1, store.num_samples):
        with pytest.raises(StoreError, match=f"sample {sample}"):
            store.read_tokens(sample)
        with pytest.raises(StoreError, match=f"0 to {store.num_samples - 1}"):
            store.read_hidden(sample)
    with pytest.raises(StoreError, match=r"layer 2[\s\S]*1, 3"):
        store.read_hidden(0, [2])
    with pytest.raises(StoreError, match=r"sample 3[\s\S]*NaN or Inf"):
        store.read_hidden(3)
    with pytest.raises(StoreError, match=r"vocab\.txt[\s\S]*config\.json, tokenizer\.json"):
        store.target_file("vocab.txt")
    with pytest.raises(StoreError, match="'nothing'"):
        store.target_array("nothing")


def test_what_is_no_store_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        Store.open(tmp_path / "missing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="there is no store"):
        Store.open(tmp_path / "file")
    with pytest.raises(StoreError, match=r"not a dflash store[\s\S]*no zarr\.json"):
        Store.open(tmp_path)
    zarr.open_group(tmp_path / "foreign", mode="w", zarr_format=3)
    with pytest.raises(StoreError, match=r"not a dflash store[\s\S]*another program"):
        Store.open(tmp_path / "foreign")


def test_a_store_of_a_newer_format_says_which_and_what_to_do(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", LENGTHS, shards=()).path
    zarr.open_group(path, mode="r+").attrs.put({"dflash": {"format_version": 2, "other": True}})
    with pytest.raises(StoreError, match="format version 2") as caught:
        Store.open(path)
    assert not isinstance(caught.value, CorruptError)
    assert "release" in str(caught.value)


def damage(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("codec", CODECS)
def test_damage_stops_the_samples_it_touches_and_names_shard_object_and_sample(tmp_path: Path, codec: Codec) -> None:
    store = make_store(tmp_path / "s", LENGTHS, codec=codec, shard_rows=64)
    samples = store.shard_samples(0)
    damage(store.path / "hidden/3/bits/c/0/0", 3)  # first chunk of the shard
    opened = Store.open(store.path)
    with pytest.raises(CorruptError, match=rf"sample {samples.start} [\s\S]*hidden/3/bits/c/0/0 \(shard 0\)"):
        opened.read_hidden(samples.start)
    opened.read_hidden(samples.start, [1])
    for sample in samples[1:]:
        opened.read_hidden(sample)


def test_a_damaged_index_a_truncated_and_a_missing_shard_are_errors_not_numbers(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", LENGTHS)
    path = store.path / "hidden/1/bits/c/0/0"
    content = path.read_bytes()
    damage(path, -10)
    with pytest.raises(CorruptError, match="index"):
        Store.open(store.path).read_hidden(0)
    for size in (len(content) - 1, 50, 0):
        path.write_bytes(content[:size])
        with pytest.raises(CorruptError, match="truncated"):
            Store.open(store.path).read_hidden(0)
    path.unlink()
    with pytest.raises(CorruptError, match="missing"):
        Store.open(store.path).read_hidden(0)
    damage(store.path / "tokens/input_ids/c/1", 0)
    sample = store.shard_samples(1).start
    with pytest.raises(CorruptError, match=f"sample {sample} "):
        Store.open(store.path).read_tokens(sample)
    damage(store.path / "samples/length/c/0", 5)
    with pytest.raises(CorruptError, match="samples/length"):
        Store.open(store.path).read_tokens(0)


def test_float32_weights_are_kept_as_they_are(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", LENGTHS, shards=())
    shutil.rmtree(store.path / "target/embed_tokens")
    shutil.rmtree(store.path / "target/final_norm")
    (store.path / "sealed/target.json").unlink()
    with pytest.raises(StoreError, match="not written yet"):
        Store.open(store.path).target_array("embed_tokens")
    weights = np.random.default_rng(0).standard_normal((3000, 100), dtype=np.float32)  # several chunks
    attributes = TargetAttributes(
        tied=True, norm_eps=1e-6, norm_kind="one_plus_weight", hidden_size=100, vocab_size=3000
    )
    write_target(store.path, {"embed_tokens": weights, "final_norm": weights[0]}, attributes)
    opened = Store.open(store.path)
    np.testing.assert_array_equal(opened.target_array("embed_tokens"), weights)
    np.testing.assert_array_equal(by_zarr(store.path, "target/embed_tokens/values"), weights)
    np.testing.assert_array_equal(by_tensorstore(store.path, "target/final_norm/values"), weights[0])
    assert opened.target_attributes == attributes


@pytest.mark.parametrize("codec", [*CODECS, "int8"])
def test_rejected_samples_never_pass_for_zeros_when_their_list_is_gone(codec: Codec, tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", LENGTHS, codec=codec, rejected=(3,), shard_rows=64).path
    shutil.rmtree(path / "rejected")
    store = Store.open(path)
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"sample 3 was rejected(.|\n)*where: .*rejected/\d+.json"):
            store.read_hidden(3)
    assert all(store.read_hidden(sample).any() for sample in range(store.num_samples) if sample != 3)


def test_only_a_store_that_may_exceed_half_of_the_memory_is_read_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", [40, 30], hidden_size=16, layer_ids=(1, 2), num_layers=4, codec="raw")
    half = 2 * store.manifest.layout.num_rows * 16 * 2
    original = os.sysconf
    for memory, expected in ((2 * half, False), (2 * half - 2, True)):
        sizes = {"SC_PHYS_PAGES": memory, "SC_PAGE_SIZE": 1}
        monkeypatch.setattr(os, "sysconf", lambda name, sizes=sizes: sizes.get(name) or original(name))
        opened = Store.open(store.path)
        assert opened.direct is expected
        np.testing.assert_array_equal(opened.read_hidden(1), store.read_hidden(1))
    assert not Store.open(store.path, direct=False).direct
    monkeypatch.undo()
    assert pickle.loads(pickle.dumps(opened)).direct
