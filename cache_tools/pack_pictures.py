"""A picture of what the packs of each strategy are like; needs matplotlib, which is imported when it is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from cache_tools.errors import ConfigError
from cache_tools.order import Permutation
from cache_tools.pack_report import Comparison
from cache_tools.pack_statistics import LengthRanks, pack_z
from cache_tools.packs import PackPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FORMATS: Final = (".png", ".svg", ".pdf")
_NUM_SHOWN_PACKS: Final = 120
_NUM_RANDOM_PACKS: Final = 10
_MIN_SEGMENT, _MAX_SEGMENT, _NUM_SEGMENTS = 64, 256, 8  # packs per spectrum, and spectra to average
_GOOD, _BAD = "#1a7f37", "#b35900"


def check_can_draw(path: Path) -> None:
    """Raises ConfigError if matplotlib is missing, or a picture cannot be written to `path`: before the long work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("Drawing needs matplotlib, which is not installed.", fix="pip install matplotlib")
    if path.suffix not in _FORMATS:
        raise ConfigError("The picture has no known format.", got=path, expected=f"a name in {', '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError("The folder of the picture does not exist.", where=path.parent, fix="make it")


def draw_comparison(comparisons: Sequence[Comparison], lengths: Ints, path: Path, *, seed: int = 0) -> None:
    """One row of panels for each strategy: mean length along the sequence, its spectrum, ten random packs.

    lengths: tokens of each sample, [n]. `path` ends in .png, .svg or .pdf. All rows have the same axes.

    Raises ConfigError if `check_can_draw` does, or if `path` cannot be written.
    """
    check_can_draw(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = len(comparisons)
    figure = Figure(figsize=(15, 0.9 + 1.9 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(num_rows, 3, squeeze=False, sharex="col", sharey="col")
    ranks = LengthRanks(lengths)
    for (sequence, spectrum, packs), item in zip(grid, comparisons, strict=True):
        color = _GOOD if item.strategy == PackPlan.strategy else _BAD
        _draw_sequence(sequence, item, lengths, color)
        _draw_spectrum(spectrum, item, ranks, color)
        _draw_packs(packs, item, lengths, color, seed)
    for axes, title in zip(
        grid[0],
        (
            f"mean length of the first {_NUM_SHOWN_PACKS} batches",
            "spectrum of the batch mean (random = 1)",
            f"{_NUM_RANDOM_PACKS} random batches (grey: 90 % of all samples)",
        ),
        strict=True,
    ):
        axes.set_title(title)
    for axes, label in zip(grid[-1], ("batch", "period in batches", "tokens of a sample"), strict=True):
        axes.set_xlabel(label)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError("The picture cannot be written.", where=path, got=error) from error


def _draw_sequence(axes: Axes, item: Comparison, lengths: Ints, color: str) -> None:
    shown = min(_NUM_SHOWN_PACKS, item.first_epoch.num_packs)
    means = [float(lengths[item.first_epoch.pack(i)].mean()) for i in range(shown)]
    axes.axhline(float(lengths.mean()), color="0.7", linewidth=1)
    axes.plot(np.arange(shown), means, color=color, linewidth=1.2, marker=".", markersize=3)
    axes.set_ylabel(item.strategy, fontsize=11, fontweight="bold")
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)


def spectrum_of(z: Floats) -> tuple[Floats, Floats]:
    """(periods, power) of a series of z, averaged over segments of at most 256; power 1 is what random packs have."""
    size = min(len(z), max(_MIN_SEGMENT, min(_MAX_SEGMENT, len(z) // _NUM_SEGMENTS)))
    segments = z[: len(z) // size * size].reshape(-1, size)
    power: Floats = (np.abs(np.fft.rfft(segments - z.mean(), axis=1)) ** 2).mean(axis=0) / size
    lines = np.arange(1, size // 2 + 1)
    return size / lines, power[1 : size // 2 + 1]


def _draw_spectrum(axes: Axes, item: Comparison, ranks: LengthRanks, color: str) -> None:
    periods, power = spectrum_of(pack_z(item.first_epoch, ranks.middle))
    axes.axhline(1, color="0.7", linewidth=1)
    axes.plot(periods, np.maximum(power, 1e-3), color=color, linewidth=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_ticks(axes.xaxis)
    period, p = item.statistics.fisher_period, item.statistics.fisher_p
    note = f"z variance {item.statistics.z_var:.2f}"
    if period is not None and p is not None and p < 1e-3:
        note += f", period {period:.1f}"
    axes.text(0.98, 0.93, note, transform=axes.transAxes, ha="right", va="top", fontsize=10)


def _draw_packs(axes: Axes, item: Comparison, lengths: Ints, color: str, seed: int) -> None:
    epoch = item.first_epoch
    order = Permutation(epoch.num_packs, seed=seed, epoch=0)(np.arange(min(_NUM_RANDOM_PACKS, epoch.num_packs)))
    low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
    axes.axvspan(low, high, color="0.92")
    axes.set_xlim(lengths.min() / 1.2, lengths.max() * 1.2)
    axes.axvline(middle, color="0.7", linewidth=1)
    for row, pack in enumerate(order.tolist()):
        inside = lengths[epoch.pack(pack)]
        axes.plot(inside, np.full(len(inside), row), "|", color=color, markersize=8, alpha=0.8)
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis)
    axes.set_yticks([])


def _plain_ticks(axis: Axis) -> None:
    """Ticks at 1, 2, 5, 10, ... written in full: the default writes powers, one over the other."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_minor_formatter(NullFormatter())
