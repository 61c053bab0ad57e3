"""Stores whose hidden states are quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
from numpy.typing import NDArray

from cache_tools.arrays import scale_arrays
from cache_tools.codec_names import Codec
from cache_tools.codecs import float32_to_bf16_bits
from cache_tools.errors import CorruptError, StoreError
from cache_tools.integrity import verify
from cache_tools.quantise import GROUP_SIZE, QUANTISED, decode, encode, parts
from cache_tools.reader import Store
from cache_tools.seals import SCALES_SEAL
from cache_tools.shards import write_array
from cache_tools.synthetic import make_scales, make_store, sample_states
from cache_tools.writer import ShardWriter

LENGTHS = [1, 30, 7, 40, 2, 13, 25]
LAYERS = (1, 3)
HIDDEN = 2 * GROUP_SIZE

pytestmark = pytest.mark.parametrize("codec", QUANTISED)


def quantised(path: Path, codec: Any, **options: Any) -> Store:
    return make_store(path, LENGTHS, hidden_size=HIDDEN, layer_ids=LAYERS, codec=codec, chunk_rows=4, **options)


def expected_bits(store: Store, codec: Codec, sample: int) -> NDArray[np.uint16]:
    """[length, num_layers, hidden]: first row exact, the rest through encode and decode alone."""
    scales = make_scales(store.manifest)
    states = sample_states(int(store.samples.length[sample]), HIDDEN, len(LAYERS), 0, sample)
    for i, layer_id in enumerate(LAYERS):
        encoded = encode(codec, states[1:, i], scales[layer_id])
        states[1:, i] = float32_to_bf16_bits(decode(codec, encoded, scales[layer_id]))
    return states


def test_a_sample_is_read_back_as_encode_and_decode_give_it_with_its_first_token_exact(
    codec: Codec, tmp_path: Path
) -> None:
    store = quantised(tmp_path / "s", codec)
    for sample in range(store.num_samples):
        assert np.array_equal(store.read_hidden(sample), expected_bits(store, codec, sample)), sample
        exact = sample_states(int(store.samples.length[sample]), HIDDEN, len(LAYERS), 0, sample)
        assert np.array_equal(store.read_hidden(sample)[0], exact[0])


def test_a_subset_of_layers_is_read_in_the_order_asked_for(codec: Codec, tmp_path: Path) -> None:
    store = quantised(tmp_path / "s", codec)
    assert np.array_equal(store.read_hidden(4, [3]), expected_bits(store, codec, 4)[:, 1:])
    assert np.array_equal(store.read_hidden(4, [3, 1]), expected_bits(store, codec, 4)[:, ::-1])


def test_zarr_and_tensorstore_read_the_parts_that_the_direct_reader_reads(codec: Codec, tmp_path: Path) -> None:
    store = quantised(tmp_path / "s", codec)
    group = zarr.open_group(str(store.path), mode="r")
    for sample in range(store.num_samples):
        start, length = int(store.samples.start[sample]), int(store.samples.length[sample])
        for name, values in store.read_parts(sample, 3).items():
            array: Any = group[f"hidden/3/{name}"]
            spec = {"driver": "zarr3", "kvstore": f"file://{store.path}/hidden/3/{name}/"}
            other = tensorstore.open(spec, open=True).result()
            row = start if name != "first" else first_row(store, sample)
            assert np.array_equal(array[row : row + len(values)], values), (sample, name)
            assert np.array_equal(other[row : row + len(values)].read().result(), values), (sample, name)
            assert len(values) == (1 if name == "first" else length)


def first_row(store: Store, sample: int) -> int:
    before = [s for s in range(sample) if store.shard_of(s) == store.shard_of(sample)]
    return store.shard_of(sample) * store.manifest.layout.samples_per_shard + len(before)


def by_zarr(store: Store, name: str) -> tuple[NDArray[Any], str]:
    """All rows of one of layer 1's arrays, and the arithmetic in its attributes."""
    array: Any = zarr.open_group(str(store.path), mode="r")[f"hidden/1/{name}"]
    return array[:], array.attrs.get("arithmetic", "")


def by_tensorstore(store: Store, name: str) -> tuple[NDArray[Any], str]:
    spec = {"driver": "zarr3", "kvstore": f"file://{store.path}/hidden/1/{name}/"}
    array = tensorstore.open(spec, open=True).result()
    attributes = array.spec().to_json(include_defaults=True)["metadata"]["attributes"]
    return np.asarray(array.read().result()), attributes.get("arithmetic", "")


@pytest.mark.parametrize("reader", [by_zarr, by_tensorstore])
def test_the_arithmetic_in_the_attributes_gives_exactly_what_decode_gives(
    codec: Codec, reader: Any, tmp_path: Path
) -> None:
    store = quantised(tmp_path / "s", codec)
    read = {name: reader(store, name) for name in (*parts(codec, HIDDEN), "channel_scale")}
    assert {line for name, (_, line) in read.items() if name != "channel_scale"} == {store.manifest.arithmetic}
    names = {name: values for name, (values, _) in read.items()} | {
        "concatenate": np.concatenate,
        "repeat": np.repeat,
    }
    assert ml_dtypes.float8_e4m3fn  # gives numpy the type that the line names
    values = eval(store.manifest.arithmetic, {"__builtins__": {}}, names)
    assert values.dtype == np.float32
    for sample in range(store.num_samples):
        start, length = int(store.samples.start[sample]), int(store.samples.length[sample])
        encoded = store.read_parts(sample, 1)
        decoded = decode(codec, encoded, store.channel_scales[1])
        assert np.array_equal(values[start : start + length], decoded)


def test_equal_contents_give_equal_bytes(codec: Codec, tmp_path: Path) -> None:
    one, two = quantised(tmp_path / "one", codec), quantised(tmp_path / "two", codec)
    files = [path.relative_to(one.path) for path in one.path.rglob("*") if path.is_file()]
    assert files and all((one.path / f).read_bytes() == (two.path / f).read_bytes() for f in files)


def test_a_sound_store_has_no_findings_and_damage_of_any_new_object_is_found(codec: Codec, tmp_path: Path) -> None:
    store = quantised(tmp_path / "s", codec, teacher="hidden")
    assert verify(store.path) == []
    objects = [path for path in store.path.glob("hidden/1/*/c/**/*") if path.is_file()]
    objects += [store.path / SCALES_SEAL, *store.path.glob("last/bits/c/0/*")]
    assert len(objects) > 4
    for path in objects:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        found = verify(store.path)
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        assert str(path.relative_to(store.path)) in {finding.object for finding in found}, path


def test_damaged_first_tokens_name_their_sample(codec: Codec, tmp_path: Path) -> None:
    store = quantised(tmp_path / "s", codec)
    sample = 5
    path = store.path / f"hidden/1/first/c/{store.shard_of(sample)}/0"
    content = bytearray(path.read_bytes())
    position = first_row(store, sample) % store.manifest.layout.samples_per_shard
    content[position * (2 * HIDDEN + 4)] ^= 1  # chunks of one row, each with its checksum
    path.write_bytes(content)
    assert [finding.samples for finding in verify(store.path)] == [(sample, sample)]


def test_sound_channel_scales_other_than_the_sealed_ones_are_never_used(codec: Codec, tmp_path: Path) -> None:
    store = quantised(tmp_path / "s", codec)
    write_array(store.path, scale_arrays(store.manifest)[3], store.channel_scales[3] * 2)  # sound, and others'
    assert [item.object for item in verify(store.path) if item.kind == "corrupt"] == ["hidden/3/channel_scale/c/0"]
    fresh = Store.open(store.path)
    with pytest.raises(CorruptError, match=r"not the channel scales(.|\n)*hidden/3/channel_scale"):
        fresh.read_hidden(0)
    (store.path / "sealed/0.json").unlink()
    with pytest.raises(CorruptError, match="not the channel scales"):
        ShardWriter(store.path, store.manifest, 0)


def test_no_shard_is_written_before_the_scales_are_sealed(codec: Codec, tmp_path: Path) -> None:
    store = quantised(tmp_path / "s", codec, shards=())
    (store.path / SCALES_SEAL).unlink()
    with pytest.raises(StoreError, match="not calibrated"):
        ShardWriter(store.path, store.manifest, 0)
