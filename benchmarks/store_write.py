"""How fast hidden states reach the disk, against plain files of the same bytes with the same flushes.

`python benchmarks/store_write.py --folder /disk --json store_write.json`. Each round writes one shard through the
store's writer, then the bytes of its files as plain files, one after the other on the same threads; both end when
everything is on disk. The table shows medians over the rounds. GB/s count bytes in files, Mtok/s tokens of five layers.
Codes of quantised codecs come ready-made, as from the device that runs the target (codec_speed.py times their making).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_tools.codecs import float32_to_bf16_bits
from cache_tools.files import publish, temporary_path
from cache_tools.quantise import QUANTISED, ChannelCalibration, encode
from cache_tools.reader import Store
from cache_tools.synthetic import make_store
from cache_tools.writer import ShardWriter

LAYERS = (1, 16, 31, 46, 61)
CODECS = ("raw", "bf16", "int8", "fp8", "int4")
SAMPLE_TOKENS = (300, 1200, 700, 2048)
CHUNK_ROWS = 64


@dataclass(frozen=True)
class Result:
    """Medians of one codec."""

    codec: str
    file_bytes: int
    tokens: int
    writer_seconds: float
    plain_seconds: float
    writer_cpu_seconds: float
    plain_cpu_seconds: float
    ratio: float
    """Speed of the writer over that of plain files: median of the rounds' ratios."""


def make_states(num_rows: int, hidden_size: int) -> NDArray[np.uint16]:
    """bfloat16 bit patterns [num_rows, hidden_size] with channels of very different size, as real ones have."""
    rng = np.random.default_rng(0)
    channels = np.exp(rng.standard_normal(hidden_size, dtype=np.float32))
    return float32_to_bf16_bits(rng.standard_normal((num_rows, hidden_size), dtype=np.float32) * channels)


def make_codes(codec: str, states: NDArray[np.uint16]) -> dict[str, NDArray[Any]]:
    """The arrays of a quantised codec for all rows of the states; none for a lossless one."""
    if codec not in QUANTISED:
        return {}
    calibration = ChannelCalibration()
    calibration.add(states)
    return encode(codec, states, calibration.scale())


def write_shard(
    store: Store, states: NDArray[np.uint16], codes: dict[str, NDArray[Any]], pool: ThreadPoolExecutor
) -> int:
    """Writes and seals the only shard; returns its tokens."""
    tokens = 0
    with ShardWriter(store.path, store.manifest, 0, store.samples, pool) as writer:
        for sample in writer.samples:
            length = int(store.samples.length[sample])
            first = sample * 64 % (len(states) - length)
            rows = slice(first, first + length)
            encoded = {name: part[rows] for name, part in codes.items()}
            writer.append(
                sample,
                dict.fromkeys(store.layer_ids, states[rows]),
                encoded=dict.fromkeys(store.layer_ids, encoded) if codes else None,
            )
            tokens += length
        writer.seal()
    return tokens


def shard_files(store: Store) -> list[Path]:
    """The files that hold the shard's arrays."""
    return sorted(path for path in store.path.glob("hidden/*/*/c/**/0") if path.is_file())


def write_plain(contents: list[bytes], folder: Path, pool: ThreadPoolExecutor) -> None:
    """The same bytes as plain files, flushed and renamed like those of a store."""

    def write(index: int) -> None:
        path = folder / str(index)
        with open(temporary_path(path), "xb") as file:
            for first in range(0, len(contents[index]), 2**20):
                file.write(memoryview(contents[index])[first : first + 2**20])
            publish(file, path)

    list(pool.map(write, range(len(contents))))


def measure(codec: Any, folder: Path, args: argparse.Namespace) -> Result:
    """Writes both ways in turn."""
    states = make_states(4096, args.hidden_size)
    codes = make_codes(codec, states)
    count = max(args.megabytes * 10**6 // (sum(SAMPLE_TOKENS) * args.hidden_size * 2 * len(LAYERS)), 1)
    lengths = list(SAMPLE_TOKENS) * count
    rows = sum(-(-length // CHUNK_ROWS) * CHUNK_ROWS for length in lengths)
    ours: list[tuple[float, float]] = []
    plain: list[tuple[float, float]] = []
    num_bytes = tokens = 0
    with ThreadPoolExecutor(args.threads) as pool:
        for _ in range(args.rounds):
            shutil.rmtree(folder, ignore_errors=True)
            store = make_store(
                folder / "store", lengths, hidden_size=args.hidden_size, layer_ids=LAYERS, num_layers=64,
                codec=codec, chunk_rows=CHUNK_ROWS, shard_rows=rows, shards=(),
            )  # fmt: skip
            os.sync()
            started = clocks()
            tokens = write_shard(store, states, codes, pool)
            ours.append(since(started))
            contents = [path.read_bytes() for path in shard_files(store)]
            num_bytes = sum(map(len, contents))
            (folder / "plain").mkdir()
            os.sync()
            started = clocks()
            write_plain(contents, folder / "plain", pool)
            plain.append(since(started))
    shutil.rmtree(folder, ignore_errors=True)
    seconds = [statistics.median(clock) for times in (ours, plain) for clock in zip(*times, strict=True)]
    ratio = statistics.median(there[0] / here[0] for there, here in zip(plain, ours, strict=True))
    return Result(codec, num_bytes, tokens, seconds[0], seconds[2], seconds[1], seconds[3], ratio)


def clocks() -> tuple[float, float]:
    """Wall clock and processor clock, seconds."""
    return time.perf_counter(), time.process_time()


def since(started: tuple[float, float]) -> tuple[float, float]:
    """Seconds on both clocks since then."""
    wall, processor = clocks()
    return wall - started[0], processor - started[1]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/store-write"), help="an empty place on the disk")
    parser.add_argument("--megabytes", type=int, default=1260, help="hidden states of a shard before encoding")
    parser.add_argument("--hidden-size", type=int, default=5120)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = [measure(codec, args.folder / "bench", args) for codec in args.codecs.split(",")]
    print("codec      GB  writer GB/s  plain GB/s  writer/plain  CPU s/GB writer, plain  writer Mtok/s")
    for item in results:
        size = item.file_bytes / 1e9
        print(
            f"{item.codec:<6} {size:>6.2f} {size / item.writer_seconds:>12.2f} {size / item.plain_seconds:>11.2f} "
            f"{item.ratio:>13.2f} {item.writer_cpu_seconds / size:>16.2f}, {item.plain_cpu_seconds / size:>5.2f} "
            f"{item.tokens / item.writer_seconds / 1e6:>14.3f}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(item) for item in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
