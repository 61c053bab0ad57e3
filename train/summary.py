"""What a finished run amounts to, from its metrics file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from train.metrics import read_metrics
from train.run_files import write_text

NUM_AVERAGED_STEPS = 20


def summarize(run: Path) -> dict[str, Any]:
    """Writes and returns `summary.json`: steps, tokens, seconds, tokens_per_second, first_loss and last_loss,
    the tokens of each data source, the samples left out, the hash of the order after the last step, and the step and
    metrics of the best validation (None without one).

    The losses are means over the first and the last `NUM_AVERAGED_STEPS` steps, of a short run over its halves, nats.
    Time counts training steps only, those of interrupted earlier processes included.
    """
    lines = read_metrics(run / "metrics.jsonl")
    seconds = sum(line["seconds"] for line in lines)
    tokens = sum(line["tokens"] for line in lines)
    losses = [line["loss"] for line in lines]
    averaged = min(NUM_AVERAGED_STEPS, max(1, len(lines) // 2))
    summary = {
        "steps": len(lines),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "first_loss": _mean(losses[:averaged]),
        "last_loss": _mean(losses[-averaged:]),
        "source_tokens": _totals(line["source_tokens"] for line in lines),
        "unreadable": sum(line["unreadable"] for line in lines),
        "order_hash": lines[-1]["order_hash"] if lines else "",
        "best_validation": _best_validation(lines),
    }
    write_text(run / "summary.json", json.dumps(summary, indent=1))
    return summary


def _best_validation(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The first with the highest acceptance length, as the best checkpoint is."""
    asked = [{"step": line["step"], **line["validation"]} for line in lines if line["validation"]]
    return max(asked, key=lambda found: found["acceptance_length"] or 0.0, default=None)


def _totals(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
