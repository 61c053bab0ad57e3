"""What a training run says: one JSON line per step, and the console line that scripts parse."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from train.run_files import write_text, writing


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step, over all its packs."""

    step: int
    """Steps done, this one included."""
    epoch: float
    """Passes over the data after this step."""
    loss: float
    """Weighted mean of what is minimised, nats: cross entropy with the labels, KL, or their mixture."""
    acc: float
    """Share of supervised slots whose arg-max is the label."""
    streak: float
    """Expected accepted tokens of a block + 1."""
    lr: float
    noise: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Context tokens of the step."""
    blocks: int
    slots: int
    """Supervised slots."""
    unreadable: int
    """Samples of the step that were left out because they could not be read."""
    order_hash: str
    """Which samples each step up to this one trained on: equal in two runs if these were the same."""
    source_tokens: dict[str, int]
    """Context tokens by data source."""
    validation: Mapping[str, Any] | None
    """What the held-out samples gave after this step; None when they were not asked."""
    seconds: float
    """Wall clock of the step, waiting for data included, validation not."""


class MetricsFile:
    """metrics.jsonl of a run. Opening it at a step drops every later line, so a resumed curve has no doubles."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        kept = []
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line, path) <= last_step]
        write_text(path, "".join(line + "\n" for line in kept))
        self._path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, metrics: StepMetrics) -> None:
        """Adds one line. Raises CheckpointError when the disk does not take it."""
        with writing(self._path):
            self._file.write(json.dumps(asdict(metrics)) + "\n")

    def close(self) -> None:
        """Ends the file. Raises CheckpointError when the disk does not take what is left."""
        with writing(self._path):
            self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _step_of(line: str, path: Path) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        # A kill in mid-write leaves a torn last line; it belongs to a step that is computed again.
        return float("inf")


@dataclass(frozen=True, kw_only=True)
class LoaderLoad:
    """State of the loader's queues since the last console line."""

    packs_read: int
    read_ahead: int
    """Samples read and waiting."""
    packs_ready: int
    wait_seconds: float
    """Time the drafter stood still for data."""

    @classmethod
    def over_ranks(cls, loads: Sequence[LoaderLoad]) -> LoaderLoad:
        """All ranks together. The one that waits longest holds up the rest."""
        return cls(
            packs_read=sum(load.packs_read for load in loads),
            read_ahead=sum(load.read_ahead for load in loads),
            packs_ready=sum(load.packs_ready for load in loads),
            wait_seconds=max(load.wait_seconds for load in loads),
        )


class Console:
    """Formats the console line. Rates cover the time since the previous line."""

    def __init__(self, *, total_steps: int, start_step: int) -> None:
        self._total = total_steps
        self._first = start_step
        self._start = self._last = time.monotonic()
        self._packs = self._tokens = 0

    def count(self, *, packs: int, tokens: int) -> None:
        """Counts what a step consumed."""
        self._packs += packs
        self._tokens += tokens

    def line(self, metrics: StepMetrics, load: LoaderLoad) -> str:
        """`[hh:mm:ss] step=N loss=X ... ETA=G`; hh:mm:ss is the time since the start of this process."""
        now = time.monotonic()
        seconds = max(now - self._last, 1e-9)
        done = metrics.step - self._first
        left = (self._total - metrics.step) * (now - self._start) / done if done else 0.0
        text = (
            f"[{_clock(now - self._start)}] step={metrics.step} loss={metrics.loss:.4f} acc={metrics.acc:.4f} "
            f"streak={metrics.streak:.3f} lr={metrics.lr:.2e} noise={metrics.noise:.3f} | "
            f"rd={load.packs_read / seconds:.2f} b/s dft={self._packs / seconds:.2f} b/s "
            f"({self._tokens / seconds / 1000:.2f} Ktok/s) | q_read=[{load.read_ahead}] "
            f"q_pack=[{load.packs_ready}] wait={100 * load.wait_seconds / seconds:.1f}% | "
            f"epoch~{metrics.epoch:.2f} ETA={_clock(left)}"
        )
        self._last, self._packs, self._tokens = now, 0, 0
        return text


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def read_metrics(path: Path) -> list[Mapping[str, Any]]:
    """All lines of a metrics.jsonl, in order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
