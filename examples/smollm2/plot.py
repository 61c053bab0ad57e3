"""One picture of a finished demo: the loss over the steps, and how often each slot of a block is accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NUM_SMOOTHED_STEPS = 50


def draw(metrics: Path, trained: Mapping[str, Any], untrained: Mapping[str, Any], out: Path) -> None:
    """Writes `out` (PNG) from a run's metrics.jsonl and two reports of `dflash-train eval`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(steps, losses, color="0.8", linewidth=0.6, label="each step")
    left.plot(steps, _running_mean(losses), color="tab:blue", label=f"mean of {NUM_SMOOTHED_STEPS} steps")
    left.set(xlabel="step", ylabel="loss (nats)", title="Training from the store: global shuffle, no padding")
    left.set_ylim(min(_running_mean(losses)) - 0.5, max(losses))
    left.legend()
    for report, name, color in ((untrained, "untrained", "0.6"), (trained, "trained", "tab:blue")):
        shares = [slot["accepted"] or 0.0 for slot in report["by_position"]]
        label = f"{name}: acceptance length {report['acceptance_length']:.2f}"
        right.plot(range(1, len(shares) + 1), shares, marker="o", color=color, label=label)
    right.set(xlabel="slot of the block", ylabel="share accepted", title="Held-out prompts, real speculative decoding")
    right.set_ylim(0, 1)
    right.legend()
    figure.savefig(out, dpi=110)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean of the last `NUM_SMOOTHED_STEPS` values up to each one."""
    means: list[float] = []
    for index in range(len(values)):
        window = values[max(0, index + 1 - NUM_SMOOTHED_STEPS) : index + 1]
        means.append(sum(window) / len(window))
    return means
