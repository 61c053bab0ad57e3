"""What each codec costs and loses on somebody's own hidden states.

Channel scales are calibrated on some samples, sizes and errors measured on others. Errors are those of what training
reads: decoded values, rounded to bfloat16. First tokens of samples count for the size, not for the error: quantised
stores hold them exactly. Shapes: T = tokens of a sample, F = layers, H = hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import METADATA
from cache_tools.codecs import CRC_BYTES, ChunkCodec, bf16_to_float32, float32_to_bf16_bits
from cache_tools.errors import ConfigError, StoreError
from cache_tools.files import Json
from cache_tools.layout import default_chunk_rows, round_up
from cache_tools.order import Permutation
from cache_tools.progress import Progress
from cache_tools.quantise import QUANTISED, ChannelCalibration, decode, encode, parts
from cache_tools.reader import Store

NUM_SAMPLES = 128
"""Samples that are used, half of them to calibrate."""
NUM_TOKENS = 65536
"""Tokens after which no further sample is taken."""

_LOSSLESS = ("bf16", "raw")
_INDEX_ENTRY_BYTES = 16  # offset and length of a chunk in its shard's index


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """Of one layer; errors are relative to the size of what is stored, 0 to 1."""

    layer_id: int
    relative_l2: float
    cosine: float
    """Mean over tokens of the cosine between decoded and true state."""
    worst_channel: int
    worst_channel_error: float
    """Root mean square error of that channel over its root mean square."""


@dataclass(frozen=True, kw_only=True)
class CodecResult:
    """One codec. A codec that cannot hold this hidden size has a `problem` and nothing else."""

    codec: str
    bytes_per_token: float = 0.0
    """All stored layers with all their arrays, padding to whole chunks, checksums and indexes."""
    ratio: float = 0.0
    """How many times smaller than plain bfloat16."""
    relative_l2: float = 0.0
    """Mean over layers."""
    layers: tuple[LayerError, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class CodecReport:
    """All codecs on the same samples."""

    calibration_tokens: int
    measured_tokens: int
    measured_samples: int
    rows_per_token: float
    """Of codecs without compression: above 1, as samples start on whole chunks."""
    codecs: tuple[CodecResult, ...]

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


class CodecComparison:
    """Gathers sample after sample: first those to calibrate on, then those to measure."""

    def __init__(self, layer_ids: Sequence[int], hidden_size: int, chunk_rows: Mapping[str, int]) -> None:
        """`chunk_rows`: by codec; each sample starts on a chunk of so many rows in the store that would hold it."""
        self._layer_ids, self._hidden_size, self._chunk_rows = tuple(layer_ids), hidden_size, dict(chunk_rows)
        self._calibrations = [ChannelCalibration() for _ in layer_ids]
        self._calibration_tokens = self._measured_tokens = self._measured_samples = self._measured_rows = 0
        self._problems = _problems(hidden_size)
        self._bytes = dict.fromkeys((*_LOSSLESS, *QUANTISED), 0)
        usable = [codec for codec in QUANTISED if codec not in self._problems]
        self._errors = {codec: [_ErrorSums(hidden_size) for _ in layer_ids] for codec in usable}
        self._scales: list[NDArray[np.float32]] | None = None

    def calibrate(self, bits: NDArray[np.uint16]) -> None:
        """Counts a sample, bfloat16 bit patterns [T, F, H], for the channel scales."""
        assert self._scales is None, "calibrate before measuring"
        self._calibration_tokens += len(bits)
        for layer, calibration in enumerate(self._calibrations):
            calibration.add(bits[1:, layer])

    def measure(self, bits: NDArray[np.uint16]) -> None:
        """Encodes and decodes a sample, bfloat16 bit patterns [T, F, H], with every codec."""
        if self._scales is None:
            self._scales = [calibration.scale() for calibration in self._calibrations]
        self._measured_tokens += len(bits)
        self._measured_samples += 1
        self._measured_rows += round_up(len(bits), self._chunk_rows["raw"])
        for layer, scale in enumerate(self._scales):
            states = np.ascontiguousarray(bits[:, layer])
            values = bf16_to_float32(states[1:])
            for lossless in _LOSSLESS:
                self._bytes[lossless] += self._stored_bytes(states, lossless)
            for codec, errors in self._errors.items():
                encoded = encode(codec, states[1:], scale)
                decoded = bf16_to_float32(float32_to_bf16_bits(decode(codec, encoded, scale)))
                errors[layer].add(values, decoded)
                first = states[:1].nbytes + CRC_BYTES + _INDEX_ENTRY_BYTES
                self._bytes[codec] += first + sum(self._part_bytes(part, len(bits), codec) for part in encoded.values())

    def report(self) -> CodecReport:
        """What was found. Some sample must have been measured."""
        plain = 2 * len(self._layer_ids) * self._hidden_size
        results = []
        for codec, num_bytes in self._bytes.items():
            if codec in self._problems:
                results.append(CodecResult(codec=codec, problem=self._problems[codec]))
                continue
            layers = tuple(
                errors.of_layer(layer_id)
                for layer_id, errors in zip(self._layer_ids, self._errors.get(codec, ()), strict=False)
            )
            per_token = num_bytes / self._measured_tokens
            results.append(
                CodecResult(
                    codec=codec,
                    bytes_per_token=per_token,
                    ratio=plain / per_token,
                    relative_l2=float(np.mean([layer.relative_l2 for layer in layers])) if layers else 0.0,
                    layers=layers,
                )
            )
        return CodecReport(
            calibration_tokens=self._calibration_tokens,
            measured_tokens=self._measured_tokens,
            measured_samples=self._measured_samples,
            rows_per_token=self._measured_rows / self._measured_tokens,
            codecs=tuple(results),
        )

    def _part_bytes(self, part: NDArray[Any], length: int, codec: str) -> int:
        """Size of one array of a quantised sample: rows up to a whole chunk, unpacked."""
        chunk_rows = self._chunk_rows[codec]
        rows = round_up(length, chunk_rows)
        overhead = CRC_BYTES + _INDEX_ENTRY_BYTES if part.ndim > 1 else 0  # scales of tokens share large chunks
        return rows * part[:1].nbytes + rows // chunk_rows * overhead

    def _stored_bytes(self, states: NDArray[np.uint16], codec: str) -> int:
        """Size of the chunks of one lossless layer, found by making them."""
        encoder, chunk_rows = ChunkCodec(states.itemsize, compressed=codec == "bf16"), self._chunk_rows[codec]
        padded = np.zeros((round_up(len(states), chunk_rows), self._hidden_size), np.uint16)
        padded[: len(states)] = states
        chunks = padded.reshape(-1, chunk_rows, self._hidden_size)
        return sum(len(encoder.encode(chunk)) + _INDEX_ENTRY_BYTES for chunk in chunks)


class _ErrorSums:
    """Squares of values and errors of one layer, by channel."""

    def __init__(self, hidden_size: int) -> None:
        self._squares, self._errors = np.zeros(hidden_size), np.zeros(hidden_size)
        self._cosines: list[float] = []

    def add(self, values: NDArray[np.float32], decoded: NDArray[np.float32]) -> None:
        """Both [T, H]."""
        true, found = values.astype(np.float64), decoded.astype(np.float64)
        self._squares += np.square(true).sum(axis=0)
        self._errors += np.square(found - true).sum(axis=0)
        norms = np.linalg.norm(true, axis=1) * np.linalg.norm(found, axis=1)
        self._cosines += ((true * found).sum(axis=1)[norms > 0] / norms[norms > 0]).tolist()

    def of_layer(self, layer_id: int) -> LayerError:
        total = float(self._squares.sum())
        by_channel = np.sqrt(self._errors / np.where(self._squares > 0, self._squares, np.inf))
        worst = int(by_channel.argmax())
        return LayerError(
            layer_id=layer_id,
            relative_l2=float(np.sqrt(self._errors.sum() / total)) if total > 0 else 0.0,
            cosine=float(np.mean(self._cosines)) if self._cosines else 1.0,
            worst_channel=worst,
            worst_channel_error=float(by_channel[worst]),
        )


def compare_in_store(store: Store, progress: Progress) -> CodecReport:
    """All codecs on a fixed choice of the samples that a lossless store has so far.

    Raises StoreError when the store is quantised or has too few samples, CorruptError when bytes are damaged.
    """
    if store.manifest.codec in QUANTISED:
        raise StoreError(
            "this store holds quantised hidden states: there is nothing exact to compare with",
            where=store.path,
            got=f"codec {store.manifest.codec}",
            expected="codec bf16 or raw",
            fix="compute some anew: dflash-precompute codecs --target TARGET --data FILE",
        )
    calibration, measured = choose_samples(store.samples.length, usable_samples(store), store.path)
    comparison = CodecComparison(store.layer_ids, store.hidden_size, planned_chunk_rows(store.samples.length))
    for sample in calibration:
        comparison.calibrate(store.read_hidden(sample))
        progress.update(1)
    for sample in measured:
        comparison.measure(store.read_hidden(sample))
        progress.update(1)
    return comparison.report()


def planned_chunk_rows(lengths: NDArray[np.integer]) -> dict[str, int]:
    """Rows per chunk by codec that a store of samples of these lengths gets unless somebody asks for others."""
    return {name: default_chunk_rows(lengths, compressed=name == "bf16") for name in (*_LOSSLESS, *QUANTISED)}


def usable_samples(store: Store) -> NDArray[np.int64]:
    """Samples with hidden states."""
    shard = store.samples.start // store.manifest.layout.shard_rows
    sealed = np.isin(shard, np.fromiter(store.sealed, np.int64))
    return store.without_rejected(np.flatnonzero(sealed))


def choose_samples(
    lengths: NDArray[np.integer], usable: NDArray[np.int64], where: object
) -> tuple[list[int], list[int]]:
    """Samples to calibrate on and others to measure, of two tokens or more: every second one of a fixed choice.

    `lengths` [num_samples]. Raises StoreError when there are not two.
    """
    usable = usable[lengths[usable] > 1]
    if len(usable) < 2:
        raise StoreError(
            "too few samples to calibrate on some and measure on others",
            where=where,
            got=f"{len(usable)} computed samples of two tokens or more",
            expected="at least 2",
        )
    chosen = usable[Permutation(len(usable), seed=0, epoch=0)(np.arange(min(NUM_SAMPLES, len(usable))))]
    before = np.cumsum(lengths[chosen]) - lengths[chosen]
    chosen = chosen[(before < NUM_TOKENS) | (np.arange(len(chosen)) < 2)]
    return chosen[::2].tolist(), chosen[1::2].tolist()


def require_store(path: Path) -> None:
    """Raises ConfigError for the folder of a target, which has no hidden states yet."""
    if (path / "config.json").is_file() and not (path / METADATA).exists():
        raise ConfigError(
            "this is a target, not a store: it takes data and a forward pass to get hidden states",
            where=path,
            fix=f"dflash-precompute codecs --target {path} --data FILE",
        )


def table_lines(report: CodecReport) -> list[str]:
    """The report for people: one line per codec and layer."""
    lines = [
        f"{report.measured_tokens:,} tokens of {report.measured_samples} samples, channel scales calibrated on "
        f"{report.calibration_tokens:,} tokens of others; errors without first tokens, which are stored exactly",
        f"padding to whole chunks makes {report.rows_per_token:.3f} rows of a token; only bf16 compresses it away",
        "codec  bytes/token  smaller  layer relative L2    cosine  worst channel",
    ]
    for result in report.codecs:
        if result.problem:
            lines.append(f"{result.codec:<6} {result.problem}")
            continue
        head = f"{result.codec:<6} {result.bytes_per_token:>11,.0f} {result.ratio:>7.2f}x"
        if not result.layers:
            lines.append(f"{head}  {'all':>5} {'exact':>11}")
        for layer in result.layers:
            lines.append(
                f"{head}  {layer.layer_id:>5} {layer.relative_l2:>11.2%} {layer.cosine:>9.6f}"
                f"  {layer.worst_channel_error:.2%} (channel {layer.worst_channel})"
            )
            head = " " * len(head)
    return lines


def _problems(hidden_size: int) -> dict[str, str]:
    """Codecs that cannot hold this hidden size, and why."""
    problems = {}
    for codec in QUANTISED:
        try:
            parts(codec, hidden_size)
        except ConfigError as error:
            problems[codec] = error.what
    return problems
