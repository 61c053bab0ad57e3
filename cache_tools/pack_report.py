"""What the command `dflash-cache packs` compares: lengths from a store or a file, and each strategy on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_tools.errors import ConfigError, DataError
from cache_tools.files import Json
from cache_tools.pack_statistics import PackStatistics, measure
from cache_tools.packs import PackPlan
from cache_tools.progress import Progress
from cache_tools.reader import Store
from cache_tools.strategies import STRATEGIES, EpochPacks, strategy_named

Ints = NDArray[np.int64]

ALL: Final = "all"
_P_VALUES: Final = ("ljung_box_p", "fisher_p", "position_p")
_COLUMN_NAMES: Final = {"token_efficiency": "token_eff", "padding_efficiency": "padding_eff"}


@dataclass(frozen=True)
class Comparison:
    """One strategy on the lengths at hand."""

    strategy: str
    first_epoch: EpochPacks
    statistics: PackStatistics


def store_lengths(path: Path) -> Ints:
    """Tokens of each sample of a store that training would use, [n]. Raises StoreError, CorruptError."""
    store = Store.open(path)
    lengths: Ints = store.samples.length[store.without_rejected()].astype(np.int64)
    return lengths


def read_lengths(path: Path) -> Ints:
    """Tokens of each sample, [n], from a text file with one whole number per line, or a one-dimensional .npy file.

    Raises DataError if the file cannot be read, is empty, or holds something else; names the first wrong entry.
    """
    try:
        lengths = _read_npy(path) if path.suffix == ".npy" else _read_text(path)
    except OSError as error:
        raise DataError("The file of lengths cannot be read.", where=path, got=error.strerror or error) from error
    if not len(lengths):
        raise DataError("The file holds no lengths.", where=path, expected="one whole number per line")
    if lengths.min() < 1:
        first = int(np.argmax(lengths < 1))
        raise DataError(
            "A length is not positive.", where=f"{path}: entry {first + 1}", got=int(lengths[first]), expected=">= 1"
        )
    return lengths


def _read_npy(path: Path) -> Ints:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError("The file of lengths is not a NumPy array.", where=path, got=error) from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "an archive"
        raise DataError("The array does not hold lengths.", where=path, got=got, expected="integers of shape (n,)")
    return array.astype(np.int64)


def _read_text(path: Path) -> Ints:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        fix = "end the names of NumPy files in .npy"
        raise DataError("The file of lengths is not text.", where=path, got=error, fix=fix) from error
    lengths = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        if not text.isdecimal() or len(text) > 18:
            raise DataError("A line is not a length.", where=f"{path}:{number}", got=text[:80], expected="whole number")
        lengths.append(int(text))
    return np.array(lengths, dtype=np.int64)


def compare(
    lengths: Ints,
    strategy: str,
    *,
    token_budget: int,
    num_epochs: int,
    packs_per_step: int,
    seed: int,
    progress: Progress | None = None,
) -> list[Comparison]:
    """Statistics of one strategy, or of all with "all", over consecutive epochs.

    lengths: tokens of each sample, [n]. Counts samples times epochs as progress.

    Raises ConfigError for an unknown strategy, a sample over the token budget, or numbers out of range.
    """
    if num_epochs < 1:
        raise ConfigError("Statistics need at least one epoch.", got=num_epochs, expected=">= 1")
    PackPlan(lengths, seed=seed, token_budget=token_budget, packs_per_step=packs_per_step)  # checks the numbers
    comparisons = []
    for name in STRATEGIES if strategy == ALL else [strategy]:
        make = strategy_named(name)
        if progress is not None:
            progress.set_note(name)
        epochs = [make(lengths, token_budget, seed, epoch) for epoch in range(num_epochs)]
        if progress is not None:
            progress.update(num_epochs * len(lengths))
        statistics = measure(
            epochs,
            lengths,
            token_budget=token_budget,
            packs_per_step=packs_per_step,
            balanced=name == PackPlan.strategy,
        )
        comparisons.append(Comparison(name, epochs[0], statistics))
    return comparisons


def to_json(comparisons: Sequence[Comparison], lengths: Ints, settings: dict[str, Json]) -> dict[str, Json]:
    """Plain JSON values: the settings, facts about the lengths, and the statistics by strategy."""
    facts: dict[str, Json] = {
        "num_samples": len(lengths),
        "num_tokens": int(lengths.sum()),
        "mean_length": float(lengths.mean()),
        "max_length": int(lengths.max()),
    }
    strategies: dict[str, Json] = {item.strategy: dict(item.statistics.to_dict()) for item in comparisons}
    return settings | facts | {"strategies": strategies}


def table_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """The statistics as an aligned table, one strategy a line."""
    names = list(comparisons[0].statistics.to_dict())
    rows = [["strategy", *(_COLUMN_NAMES.get(name, name) for name in names)]]
    for item in comparisons:
        values = item.statistics.to_dict()
        rows.append([item.strategy, *(_shown(name, values[name]) for name in names)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in _P_VALUES:
        return "<1e-9" if value < 1e-9 else f"{value:.2g}"
    if name == "packs":
        return f"{value:.0f}"
    if name in ("fisher_period", "co_occurrence"):
        return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
    return f"{value:.4f}" if "efficiency" in name or "balance" in name else f"{value:.3f}"
