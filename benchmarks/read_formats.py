"""The formats that `store_read` compares: how each is written, and how a worker reads a whole sample from it.

Letters: L = tokens of a sample, F = layers, H = hidden size. Every reader delivers a sample in memory that the worker
owns: in a buffer that is used again where the library can do that, otherwise in the array that it returns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_tools.codec_names import Codec
from cache_tools.layout import DEFAULT_CHUNK_ROWS, default_shard_rows, plan_layout
from cache_tools.manifest import TargetAttributes
from cache_tools.quantise import ChannelCalibration
from cache_tools.reader import Store
from cache_tools.scales import write_scales
from cache_tools.synthetic import make_files, make_manifest, sample_tokens
from cache_tools.writer import SampleColumns, ShardWriter, bind_engine, create_store, write_target

LAYER_IDS = (1, 16, 31, 46, 61)
HIDDEN_SIZE = 5120
BYTES_PER_TOKEN = len(LAYER_IDS) * HIDDEN_SIZE * 2

ReadSample = Callable[[int], object]


@dataclass(frozen=True)
class Data:
    """The samples, in one raw file: bfloat16 bit patterns [tokens, F, H]."""

    path: Path
    lengths: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """First row of every sample in the file, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def map(self) -> NDArray[np.uint16]:
        return np.memmap(self.path, np.uint16, "r").reshape(-1, len(LAYER_IDS), HIDDEN_SIZE)

    def samples(self) -> Iterator[NDArray[np.uint16]]:
        rows = self.map()
        for first, length in zip(self.starts, self.lengths, strict=False):
            yield rows[first : first + length]

    def buffer(self) -> NDArray[np.uint16]:
        """Room for the longest sample, [L, F, H], with its pages present."""
        return np.ones((int(self.lengths.max()), len(LAYER_IDS), HIDDEN_SIZE), np.uint16)


def make_data(path: Path, num_tokens: int, states: Store, seed: int) -> Data:
    """Real hidden states of a smaller target, documents side by side until a row is as wide as a 27B target's.

    Lengths are lognormal, 1,000 tokens on average.
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(755), 0.75, num_tokens // 64), 32, 8192).astype(np.int64)
    lengths = lengths[: max(int(np.searchsorted(np.cumsum(lengths), num_tokens)), 1)]
    rows_per_shard = default_shard_rows(HIDDEN_SIZE, int(lengths.max()), DEFAULT_CHUNK_ROWS)
    lengths = plan_layout(lengths, chunk_rows=DEFAULT_CHUNK_ROWS, shard_rows=rows_per_shard).length
    width = -(-HIDDEN_SIZE // states.hidden_size)
    streams = [_Stream(states, rng.permutation(states.num_samples)) for _ in range(width)]
    with open(path, "wb") as file:
        for length in lengths.tolist():
            wide = np.concatenate([stream.take(length) for stream in streams], axis=2)[:, :, :HIDDEN_SIZE]
            file.write(np.ascontiguousarray(wide).data)
        file.flush()
        os.fsync(file.fileno())
    return Data(path, lengths)


class _Stream:
    """Tokens of a store's samples, one sample after the other, for ever."""

    def __init__(self, store: Store, order: NDArray[np.int64]) -> None:
        self._store, self._order, self._next = store, order, 0
        self._rest = self._read()

    def take(self, length: int) -> NDArray[np.uint16]:
        """The next tokens, [length, F, hidden size of the store]."""
        while len(self._rest) < length:
            self._rest = np.concatenate([self._rest, self._read()])
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken

    def _read(self) -> NDArray[np.uint16]:
        sample = int(self._order[self._next % len(self._order)])
        self._next += 1
        return self._store.read_hidden(sample, self._store.layer_ids[: len(LAYER_IDS)])


def write_store(path: Path, data: Data, codec: Codec) -> None:
    longest = int(data.lengths.max())
    shard_rows = default_shard_rows(HIDDEN_SIZE, longest, DEFAULT_CHUNK_ROWS)
    layout = plan_layout(data.lengths, chunk_rows=DEFAULT_CHUNK_ROWS, shard_rows=shard_rows)
    assert np.array_equal(layout.order, np.arange(layout.num_samples)), "samples lie in the order of the store"
    manifest = make_manifest(
        layout, hidden_size=HIDDEN_SIZE, layer_ids=LAYER_IDS, num_layers=64, vocab_size=64, codec=codec
    )
    tokens = (sample_tokens(int(length), 64, 0, i) for i, length in enumerate(layout.length))
    columns = SampleColumns(np.zeros(layout.num_samples, np.int32), layout.order)
    create_store(path, manifest.plan(), layout, columns, tokens, make_files(64))
    bind_engine(path, manifest)
    attributes = TargetAttributes(tied=True, norm_eps=1e-6, norm_kind="plain", hidden_size=HIDDEN_SIZE, vocab_size=64)
    ones = np.ones((64, HIDDEN_SIZE), np.float32)
    write_target(path, {"embed_tokens": ones, "final_norm": ones[0]}, attributes)
    write_scales(path, _scales(data) if codec not in ("bf16", "raw") else {})
    states = data.samples()
    for shard in range(layout.num_shards):
        with ShardWriter(path, manifest, shard) as writer:
            for sample in writer.samples:
                bits = next(states)
                writer.append(sample, {layer: bits[:, i] for i, layer in enumerate(LAYER_IDS)})
            writer.seal()


def _scales(data: Data) -> dict[int, NDArray[np.float32]]:
    bits = next(data.samples())[1:]
    scales = {}
    for i, layer in enumerate(LAYER_IDS):
        calibration = ChannelCalibration()
        calibration.add(bits[:, i])
        scales[layer] = calibration.scale()
    return scales


def write_torch(path: Path, data: Data) -> None:
    import torch

    path.mkdir()
    for i, bits in enumerate(data.samples()):
        with open(path / f"{i}.pt", "wb") as file:
            torch.save({"hidden_states": torch.from_numpy(bits.copy()).view(torch.bfloat16)}, file)


def write_safetensors(path: Path, data: Data) -> None:
    import torch
    from safetensors.torch import save_file

    path.mkdir()
    for i, bits in enumerate(data.samples()):
        save_file({"hidden_states": torch.from_numpy(bits.copy()).view(torch.bfloat16)}, path / f"{i}.safetensors")


def write_index(path: Path, data: Data) -> None:
    """The raw file itself is the format; only its index is written."""
    path.mkdir()
    (path / "index.json").write_text(json.dumps(data.starts.tolist()), encoding="utf-8")


def by_memory_map(path: Path, data: Data) -> ReadSample:
    """The limit: a copy out of a memory map of the raw file."""
    rows, starts, out = data.map(), data.starts.tolist(), data.buffer()

    def read(sample: int) -> object:
        first, end = starts[sample], starts[sample + 1]
        out[: end - first] = rows[first:end]
        return out

    return read


def by_pread(path: Path, data: Data) -> ReadSample:
    """One big raw file with an index, one `preadv` per sample."""
    starts, out = json.loads((path / "index.json").read_text(encoding="utf-8")), data.buffer()
    descriptor = os.open(data.path, os.O_RDONLY)

    def read(sample: int) -> object:
        target = out[: starts[sample + 1] - starts[sample]].reshape(-1).view(np.uint8)
        offset, done = starts[sample] * BYTES_PER_TOKEN, 0
        while done < len(target):
            done += os.preadv(descriptor, [target[done:].data], offset + done)
        return out

    return read


def by_our_reader(path: Path, data: Data, *, direct: bool) -> ReadSample:
    """Bit patterns of a lossless store, decoded. `direct`: as of a store that is larger than memory."""
    store, lengths = Store.open(path, direct=direct), data.lengths.tolist()
    out = np.ones((len(LAYER_IDS), max(lengths), HIDDEN_SIZE), np.uint16)

    def read(sample: int) -> object:
        return store.read_hidden(sample, out=out[:, : lengths[sample]].transpose(1, 0, 2))

    return read


def parts_by_our_reader(path: Path, data: Data, *, direct: bool) -> ReadSample:
    """Codes and scales of a quantised store, as they are handed to the device."""
    store, lengths = Store.open(path, direct=direct), data.lengths.tolist()
    longest = int(data.lengths.argmax())
    parts = {
        layer: {name: np.ones_like(values) for name, values in store.read_parts(longest, layer).items()}
        for layer in LAYER_IDS
    }

    def read(sample: int) -> object:
        for layer, arrays in parts.items():
            store.read_parts(sample, layer, {name: values[: lengths[sample]] for name, values in arrays.items()})
        return parts

    return read


def by_zarr_python(path: Path, data: Data) -> ReadSample:
    import zarr

    group: Any = zarr.open_group(path, mode="r")
    starts, lengths = Store.open(path).samples.start.tolist(), data.lengths.tolist()
    arrays = [array for layer in LAYER_IDS for name, array in group[f"hidden/{layer}"].arrays() if name in _PER_ROW]

    def read(sample: int) -> object:
        return [array[starts[sample] : starts[sample] + lengths[sample]] for array in arrays]

    return read


def by_tensorstore(path: Path, data: Data) -> ReadSample:
    import tensorstore

    starts, lengths = Store.open(path).samples.start.tolist(), data.lengths.tolist()
    folders = [folder for layer in LAYER_IDS for folder in sorted((path / "hidden" / str(layer)).iterdir())]
    arrays = [
        tensorstore.open({"driver": "zarr3", "kvstore": f"file://{folder}/"}, open=True, read=True).result()
        for folder in folders
        if folder.name in _PER_ROW
    ]

    def read(sample: int) -> object:
        rows = slice(starts[sample], starts[sample] + lengths[sample])
        return [future.result() for future in [array[rows].read() for array in arrays]]

    return read


_PER_ROW = ("bits", "codes", "token_scale", "group_scale")


def by_torch_load(path: Path, data: Data) -> ReadSample:
    import torch

    return lambda sample: torch.load(path / f"{sample}.pt", weights_only=True)


def by_torch_load_mapped(path: Path, data: Data) -> ReadSample:
    import torch

    out = torch.from_numpy(data.buffer()).view(torch.bfloat16)

    def read(sample: int) -> object:
        states = torch.load(path / f"{sample}.pt", weights_only=True, mmap=True)["hidden_states"]
        return out[: len(states)].copy_(states)

    return read


def by_safetensors(path: Path, data: Data) -> ReadSample:
    import torch
    from safetensors import safe_open

    out = torch.from_numpy(data.buffer()).view(torch.bfloat16)

    def read(sample: int) -> object:
        with safe_open(path / f"{sample}.safetensors", framework="pt") as file:
            states = file.get_tensor("hidden_states")
            return out[: len(states)].copy_(states)

    return read


@dataclass(frozen=True)
class Format:
    write: Callable[[Path, Data], None]
    readers: dict[str, Callable[[Path, Data], ReadSample]]
    cold_readers: dict[str, Callable[[Path, Data], ReadSample]] = field(default_factory=dict)
    """What takes the place of those when nothing is in the page cache."""


def _store_format(codec: Codec, ours: Callable[..., ReadSample]) -> Format:
    label = f"store {codec}, our reader"
    readers: dict[str, Callable[[Path, Data], ReadSample]] = {label: partial(ours, direct=False)}
    if codec in ("bf16", "raw", "int8"):
        readers |= {f"store {codec}, zarr-python": by_zarr_python, f"store {codec}, tensorstore": by_tensorstore}
    cold: dict[str, Callable[[Path, Data], ReadSample]] = {label: partial(ours, direct=True)}
    return Format(lambda path, data: write_store(path, data, codec), readers, cold)


FORMATS = {
    "bf16": _store_format("bf16", by_our_reader),
    "raw": _store_format("raw", by_our_reader),
    "int8": _store_format("int8", parts_by_our_reader),
    "fp8": _store_format("fp8", parts_by_our_reader),
    "int4": _store_format("int4", parts_by_our_reader),
    "torch": Format(
        write_torch,
        {"torch.load file per sample": by_torch_load, "torch.load(mmap) file per sample + copy": by_torch_load_mapped},
    ),
    "safetensors": Format(write_safetensors, {"safetensors file per sample + copy": by_safetensors}),
    "index": Format(write_index, {"one raw file, index, preadv": by_pread}),
}
