"""Trains the demo's drafter with several data orders, same seed and same tokens, and draws what the loss does.

    python benchmarks/data_order.py --demo demo --out demo/data-order

Needs the store and the target of a finished `make demo`. Every part resumes; a finished one is not done again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "smollm2"
SCRIPTS = Path(sys.executable).parent
ORDERS = ("sorted-chunks", "bucketed", "global")
NUM_LAGS = 30
SMOOTHING_STEPS = 61
"""Window of the running median that is taken off the loss before its autocorrelation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True, help="folder of a finished `make demo`")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs, results.json and data-order.png")
    parser.add_argument("--epochs", type=float, default=3.0, help="passes over the store, the same for every order")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one training per order and seed")
    parser.add_argument("--token-budget", type=int, default=3072, help="tokens of a pack, which is a step")
    parser.add_argument("--anchors", type=int, default=288, help="blocks of a step")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts for the acceptance length")
    arguments = parser.parse_args()
    results = [measure(arguments, order, seed) for seed in arguments.seeds for order in ORDERS]
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    draw(arguments.out, arguments.seeds[0])
    print("| order | seed | steps | last loss | step-loss deviation | autocorrelation, lags 8-11 | acceptance length |")
    print("|---|---|---|---|---|---|---|")
    for one in results:
        print(
            f"| {one['order']} | {one['seed']} | {one['steps']:,} | {one['last_loss']:.3f} | {one['deviation']:.3f} | "
            f"{one['autocorrelation']:+.3f} | {one['acceptance_length']:.3f} |"
        )


def measure(arguments: argparse.Namespace, order: str, seed: int) -> dict[str, Any]:
    """Trains and evaluates with one order and one seed; all other settings are the demo's."""
    run = arguments.out / f"{order}-{seed}"
    report = run / "eval.json"
    train = [SCRIPTS / "dflash-train", "run", "--config", EXAMPLE / "short" / "train.yaml", "--order", order]
    train += ["--store", arguments.demo / "short" / "store.zarr", "--init-target", arguments.demo / "target"]
    train += ["--out", run, "--seed", seed, "--steps", steps_for(arguments, order)]
    train += ["--token-budget", arguments.token_budget, "--anchors-per-step", arguments.anchors]
    call(train)
    if not report.exists():
        evaluate = [SCRIPTS / "dflash-train", "eval", "--target", arguments.demo / "target", "--drafter", run]
        evaluate += ["--prompts", EXAMPLE / "heldout.jsonl", "--max-prompts", arguments.prompts, "--dtype", "bfloat16"]
        evaluate += ["--max-new-tokens", "64", "--no-plain", "--json"]
        report.write_text(call(evaluate), encoding="utf-8")
    losses = read_losses(run)
    rest = residuals(losses)
    return {
        "order": order,
        "seed": seed,
        "steps": len(losses),
        "last_loss": float(np.mean(losses[-100:])),
        "deviation": float(rest.std()),
        "autocorrelation": float(max(autocorrelation(rest)[8:12])),
        "acceptance_length": json.loads(report.read_text(encoding="utf-8"))["acceptance_length"],
    }


def steps_for(arguments: argparse.Namespace, order: str) -> int:
    """Steps of one pack that cover `--epochs` passes; padded orders need more for the same tokens."""
    from cache_tools.reader import Store
    from cache_tools.strategies import STRATEGIES

    lengths = Store.open(arguments.demo / "short" / "store.zarr").samples.length.astype(np.int64)
    packs_per_epoch = STRATEGIES[order](lengths, arguments.token_budget, 0, 0).num_packs
    return max(1, int(arguments.epochs * packs_per_epoch))


def read_losses(run: Path) -> NDArray[np.float64]:
    """Loss of every step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


def residuals(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """The loss without its trend, from the second third on, where the trend is slow."""
    half = SMOOTHING_STEPS // 2
    windows = np.lib.stride_tricks.sliding_window_view(losses, SMOOTHING_STEPS)
    rest: NDArray[np.float64] = (losses[half:-half] - np.median(windows, axis=1))[len(losses) // 3 :]
    return rest


def autocorrelation(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """At lags 0..NUM_LAGS."""
    centred = values - values.mean()
    size = float(centred @ centred)
    return np.array([float(centred[: len(centred) - lag] @ centred[lag:]) / size for lag in range(NUM_LAGS + 1)])


def draw(out: Path, seed: int) -> None:
    """data-order.png: a stretch of the loss of each order, and its autocorrelation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(ORDERS), figsize=(11, 5), layout="constrained", sharey="row")
    for column, order in enumerate(ORDERS):
        rest = residuals(read_losses(out / f"{order}-{seed}"))
        color = "tab:blue" if order == "global" else "tab:red"
        axes[0, column].plot(rest[:90], color=color, linewidth=1)
        axes[0, column].set(title=order, xlabel="step (90 of them)")
        correlation = autocorrelation(rest)
        axes[1, column].bar(range(1, NUM_LAGS + 1), correlation[1:], color=color)
        band = 2 / np.sqrt(len(rest))
        axes[1, column].axhspan(-band, band, color="0.85", zorder=0)
        axes[1, column].set(xlabel="lag (steps)")
    axes[0, 0].set_ylabel("loss - its trend (nats)")
    axes[1, 0].set_ylabel("autocorrelation (grey: noise)")
    figure.savefig(out / "data-order.png", dpi=110)


def call(command: list[Any]) -> str:
    """Runs a command, its progress visible; returns its standard output."""
    words = [str(word) for word in command]
    print("$", " ".join([Path(words[0]).name, *words[1:]]), file=sys.stderr, flush=True)
    return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    main()
