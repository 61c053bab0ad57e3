"""How fast whole samples are read in random order: our reader, other readers of the same store, and other formats.

    python benchmarks/store_read.py --states demo/short/store.zarr --json store_read.json

Writes the same samples in every format, hidden states of the shape of a 27B target (5 layers x 5,120) made of the real
ones in --states, and reads them in the same random order: warm, after every worker has read all of them once; and cold,
with nothing of them in the page cache, where our reader reads as from a store larger than memory. Two processes;
several threads each when cold, the same number for every reader. Each reader is measured right after the limit, a copy
out of a memory map of the raw bfloat16 file; ratios are medians over such pairs, so that a slower minute of the machine
slows both. Needs about 6 times 51 KB per token of disk space.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from read_costs import cost_line, read_costs
from read_formats import BYTES_PER_TOKEN, FORMATS, Data, ReadSample, by_memory_map, make_data

from cache_tools import page_cache
from cache_tools.layout import DEFAULT_CHUNK_ROWS, plan_layout
from cache_tools.reader import Store
from cache_tools.synthetic import make_files, make_manifest, sample_tokens
from cache_tools.writer import SampleColumns, create_store

TARGETS: dict[str, dict[str, float]] = {
    "store raw, our reader": {"warm": 0.9},
    "store int8, our reader": {"warm": 1.5, "cold": 1.8},
    "store bf16, our reader": {"warm": 0.35, "cold": 1.2},
}
"""What we want to reach, in tokens/s relative to the limit."""
AGAINST_ZARR = {"raw": 4.0, "int8": 4.0, "bf16": 2.0}
"""The same relative to zarr-python on the same store, warm."""


@dataclass(frozen=True)
class Result:
    """One reader at one temperature: medians over the rounds."""

    reader: str
    temperature: str
    tokens_per_s: float
    ratio: float
    """Tokens per second relative to the limit, measured just before."""
    file_gb_per_s: float
    cpu_s_per_gb: float
    """CPU seconds, of the kernel too, per GB of decoded bfloat16."""
    bytes_per_token: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=Path, required=True, help="a store with hidden states of five layers or more")
    parser.add_argument("--work", type=Path, help="folder on the disk to measure; a temporary one by default")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--tokens", type=int, default=20000, help="about how many tokens to write in each format")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cold-threads", type=int, default=2, help="threads of each process when cold; one when warm")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements per reader and temperature")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="leave what was written in the work folder")
    arguments = parser.parse_args()
    with work_folder(arguments.work, keep=arguments.keep) as work:
        print(f"writing to {work}", flush=True)
        data = make_data(work / "raw.bin", arguments.tokens, Store.open(arguments.states), arguments.seed)
        for name in arguments.formats:
            begin = time.perf_counter()
            FORMATS[name].write(work / name, data)
            print(f"  {name}: {time.perf_counter() - begin:.0f} s", flush=True)
        os.sync()
        costs = {codec: read_costs(work / codec) for codec in ("raw", "bf16") if codec in arguments.formats}
        results = measure_all(arguments, work, data)
        opening = open_a_million(work)
    profile = [cost_line(codec, steps) for codec, steps in costs.items()]
    print("\n".join([*table(results), *verdicts(results), *profile, opening["text"]]))
    if arguments.json:
        settings = {name: str(value) for name, value in vars(arguments).items()}
        report = {"settings": settings, "samples": len(data.lengths), "tokens": int(data.lengths.sum())}
        report |= {"results": [asdict(result) for result in results], "costs": costs, "open": opening}
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


@contextmanager
def work_folder(path: Path | None, *, keep: bool) -> Iterator[Path]:
    """A new folder inside `path`, deleted afterwards."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="store-read-", dir=path))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder)


def measure_all(arguments: argparse.Namespace, work: Path, data: Data) -> list[Result]:
    """Every reader warm, then every reader cold, each time right after the limit."""
    order = np.random.default_rng(arguments.seed).permutation(len(data.lengths))
    limit = partial(by_memory_map, work, data)
    results = []
    for temperature, threads in (("warm", 1), ("cold", arguments.cold_threads)):
        timed = partial(from_empty, order, arguments.processes, threads, warm_up=temperature == "warm")
        limits = []
        for label, reader, files in readers(arguments.formats, work, data, cold=temperature == "cold"):
            pairs = [[timed(limit, [data.path]), timed(reader, files)] for _ in range(arguments.rounds)]
            limits += [first for first, _ in pairs]
            results.append(summary(label, temperature, pairs, data, files))
            print(f"  {temperature}: {label}: {results[-1].ratio:.2f}", flush=True)
        pairs = [[first, first] for first in limits]
        results.append(summary("raw memory map + copy (the limit)", temperature, pairs, data, [data.path]))
    return results


def readers(
    formats: list[str], work: Path, data: Data, *, cold: bool
) -> Iterator[tuple[str, Callable[[], ReadSample], list[Path]]]:
    """Name, maker and files of every reader."""
    for name in formats:
        path, chosen = work / name, FORMATS[name]
        files = [data.path] if name == "index" else files_of(path)
        for label, maker in (chosen.readers | (chosen.cold_readers if cold else {})).items():
            yield label, partial(maker, path, data), files


def from_empty(
    order: NDArray[np.int64],
    num_processes: int,
    num_threads: int,
    make_reader: Callable[[], ReadSample],
    files: list[Path],
    *,
    warm_up: bool,
) -> tuple[float, float]:
    """`measure`, from an empty page cache: where in memory pages lie makes a factor of two."""
    page_cache.drop(files)
    assert page_cache.cached_share(files) < 0.01, "the files are still in the page cache"
    return measure(make_reader, order, num_processes, num_threads, warm_up=warm_up)


def files_of(path: Path) -> list[Path]:
    """All files of a format that hold hidden states."""
    return [found for found in sorted(path.rglob("*")) if found.is_file() and found.stat().st_size > 2**16]


def measure(
    make_reader: Callable[[], ReadSample],
    order: NDArray[np.int64],
    num_processes: int,
    num_threads: int,
    *,
    warm_up: bool,
) -> tuple[float, float]:
    """Wall and CPU seconds to read all samples; workers take the next sample of `order` when they are free.

    `warm_up`: each worker reads every sample once before the clock starts.
    """
    context = multiprocessing.get_context("fork")
    ready, taken, queue = context.Barrier(num_processes), context.Value("q", 0), context.SimpleQueue()

    def take() -> int | None:
        with taken.get_lock():
            position = taken.value
            taken.value += 1
        return int(order[position]) if position < len(order) else None

    def read_all(read: ReadSample) -> None:
        while (sample := take()) is not None:
            read(sample)

    def work() -> None:
        readers = [make_reader() for _ in range(num_threads)]
        for sample in order.tolist() if warm_up else ():
            readers[0](sample)
        threads = [threading.Thread(target=read_all, args=(read,)) for read in readers]
        ready.wait()
        begin, cpu = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        queue.put((begin, time.perf_counter(), time.process_time() - cpu))

    workers = [context.Process(target=work) for _ in range(num_processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0, "a worker failed"
    times = [queue.get() for _ in workers]
    return max(end for _, end, _ in times) - min(begin for begin, _, _ in times), sum(cpu for _, _, cpu in times)


def summary(
    label: str, temperature: str, pairs: list[list[tuple[float, float]]], data: Data, files: list[Path]
) -> Result:
    tokens = int(data.lengths.sum())
    seconds = statistics.median(reader[0] for _, reader in pairs)
    bytes_per_token = sum(path.stat().st_size for path in files) / tokens
    return Result(
        reader=label,
        temperature=temperature,
        tokens_per_s=tokens / seconds,
        ratio=statistics.median(limit[0] / reader[0] for limit, reader in pairs),
        file_gb_per_s=bytes_per_token * tokens / seconds / 1e9,
        cpu_s_per_gb=statistics.median(reader[1] for _, reader in pairs) / (tokens * BYTES_PER_TOKEN / 1e9),
        bytes_per_token=bytes_per_token,
    )


def open_a_million(work: Path) -> dict[str, Any]:
    """Seconds to open a store of a million samples and to read its table, which holds all that training asks for."""
    layout = plan_layout(np.ones(1_000_000, np.int64), chunk_rows=DEFAULT_CHUNK_ROWS, shard_rows=2**20)
    manifest = make_manifest(layout, hidden_size=32, layer_ids=(0,), num_layers=2, vocab_size=8, codec="raw")
    columns = SampleColumns(np.zeros(layout.num_samples, np.int32), layout.order)
    one = sample_tokens(1, 8, 0, 0)
    create_store(work / "million", manifest, layout, columns, (one for _ in range(layout.num_samples)), make_files(8))
    page_cache.drop(path for path in (work / "million").rglob("*") if path.is_file())
    begin = time.perf_counter()
    store = Store.open(work / "million")
    opened = time.perf_counter()
    table = store.samples
    num_bytes = sum(column.nbytes for column in (table.start, table.length, table.supervised, table.content_id))
    read = time.perf_counter()
    text = (
        f"1,000,000 samples, cold: opened in {opened - begin:.3f} s, table read in {read - opened:.3f} s, "
        f"{num_bytes / 1e6:.0f} MB"
    )
    return {"open_s": opened - begin, "table_s": read - opened, "table_bytes": num_bytes, "text": text}


def table(results: list[Result]) -> list[str]:
    """Markdown, one row per reader."""
    lines = [
        "| reader | bytes/token | warm ktok/s (x limit) | file GB/s | CPU s/GB "
        "| cold ktok/s (x limit) | file GB/s | CPU s/GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label in dict.fromkeys(result.reader for result in reversed(results)):
        cells = [
            f"{one.tokens_per_s / 1e3:.0f} ({one.ratio:.2f}) | {one.file_gb_per_s:.1f} | {one.cpu_s_per_gb:.2f}"
            for one in results
            if one.reader == label
        ]
        size = next(result.bytes_per_token for result in results if result.reader == label)
        lines.append(f"| {label} | {size:,.0f} | {' | '.join(cells)} |")
    return lines


def verdicts(results: list[Result]) -> list[str]:
    """What was to be reached, and whether it was."""
    found = {(result.reader, result.temperature): result for result in results}
    lines = []
    for reader, wanted in TARGETS.items():
        for temperature, least in wanted.items():
            if (reader, temperature) in found:
                lines.append(_verdict(f"{reader}, {temperature}, x limit", found[reader, temperature].ratio, least))
    for codec, least in AGAINST_ZARR.items():
        pair = [found.get((f"store {codec}, {reader}", "warm")) for reader in ("our reader", "zarr-python")]
        if pair[0] is not None and pair[1] is not None:
            ratio = pair[0].ratio / pair[1].ratio
            lines.append(_verdict(f"store {codec}, warm, x zarr-python", ratio, least))
    peers = [one for one in results if one.temperature == "cold" and "our reader" not in one.reader]
    best = max((one for one in peers if "limit" not in one.reader), key=lambda one: one.ratio, default=None)
    if best is not None and ("store bf16, our reader", "cold") in found:
        ratio = found["store bf16, our reader", "cold"].ratio / best.ratio
        lines.append(_verdict(f"store bf16, cold, x the best other reader ({best.reader})", ratio, 1.0))
    return lines


def _verdict(what: str, ratio: float, least: float) -> str:
    return f"{'reached' if ratio >= least else 'MISSED '} {what}: {ratio:.2f}, wanted {least}"


if __name__ == "__main__":
    main()
