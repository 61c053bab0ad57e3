"""How fast the loader delivers packs by plan, and what share of its time training waits for it.

    python benchmarks/loader.py --demo demo/short --out demo/loader.json

Needs the store of a finished `make demo`. Planning is measured on 902,000 lognormal lengths of mean 2,000.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "smollm2"
NUM_PLANNED_SAMPLES = 902_000
TOKEN_BUDGET = 49_152


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True, help="folder of a finished demo, with its store.zarr")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the numbers")
    parser.add_argument("--steps", type=int, default=400, help="training steps of one pack")
    parser.add_argument("--epochs", type=int, default=3, help="passes of the loader alone over the store")
    parser.add_argument("--threads", type=int, default=None, help="compute threads (default: torch's choice)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {"plan": plan_costs()}
        found["loader alone"] = loader_alone(arguments, Path(folder) / "alone")
        found["training"] = training(arguments, Path(folder) / "training")
    arguments.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print("\n".join(table(found)))


def plan_costs() -> dict[str, float]:
    """Seconds until the first step of a large plan is known, and for a whole epoch of packs; bytes of its state."""
    from cache_tools.packs import PackCursor, PackPlan

    drawn = np.random.default_rng(0).lognormal(np.log(2000) - 0.75**2 / 2, 0.75, NUM_PLANNED_SAMPLES)
    lengths = drawn.clip(100, 8192).astype(np.int64)
    began = time.perf_counter()
    plan = PackPlan(lengths, seed=0, token_budget=TOKEN_BUDGET, packs_per_step=8, supervised=lengths // 2)
    _, cursor = plan.step(PackCursor())
    first = time.perf_counter() - began
    began = time.perf_counter()
    for window in range(plan.num_windows):
        plan.window_packs(1, window)
    return {
        "samples": NUM_PLANNED_SAMPLES,
        "seconds to the first step": first,
        "seconds for an epoch": time.perf_counter() - began,
        "bytes of state": len(json.dumps(plan.state(cursor))),
    }


def state_of(arguments: argparse.Namespace, run: Path) -> Any:
    """A fresh training of `make demo`, with the settings of its recipe."""
    from cache_tools.settings import load_config
    from train.config import TrainConfig
    from train.state import prepare

    given = {"store": arguments.demo / "store.zarr", "out": run, "threads": arguments.threads}
    return prepare(load_config(TrainConfig, EXAMPLE / "short" / "train.yaml", given), lambda _: None)


def loader_alone(arguments: argparse.Namespace, run: Path) -> dict[str, float]:
    """Rates of a consumer that takes packs as fast as they come; decoded bytes."""
    state = state_of(arguments, run)
    num_steps = state.plan.num_steps(arguments.epochs)
    began = time.perf_counter()
    with state.open_loader() as loader:
        tokens = sum(batch.tokens for batch in taken(loader, num_steps))
        seconds = time.perf_counter() - began
    num_bytes = tokens * len(state.layer_ids) * state.store.hidden_size * 2
    return {
        "packs per second": num_steps * state.config.packs_per_step / seconds,
        "Ktok per second": tokens / seconds / 1e3,
        "GB per second": num_bytes / seconds / 1e9,
        "seconds": seconds,
    }


def training(arguments: argparse.Namespace, run: Path) -> dict[str, float]:
    """Rates of real training steps, and the share of the time, the start included, that they wait for a pack."""
    from train.loop import train_step

    state = state_of(arguments, run)
    tokens, first_wait = 0, 0.0
    began = time.perf_counter()
    with state.open_loader() as loader:
        for batch in taken(loader, arguments.steps):
            first_wait = first_wait or loader.stats().wait_seconds
            train_step(state, batch, lr=state.config.lr / 10, noise=0.0)
            tokens += batch.tokens
        seconds = time.perf_counter() - began
        waited = loader.stats().wait_seconds
    return {
        "packs per second": arguments.steps * state.config.packs_per_step / seconds,
        "Ktok per second": tokens / seconds / 1e3,
        "seconds": seconds,
        "wait share, %": 100 * waited / seconds,
        "first pack after, s": first_wait,
    }


def taken(loader: Any, num_steps: int) -> Iterator[Any]:
    """The first steps; asks for none that is not used, since asking waits."""
    for _ in range(num_steps):
        yield next(loader)


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """Markdown."""
    lines = ["| | | |", "|---|---|---|"]
    for part, numbers in found.items():
        lines += [f"| {part} | {name} | {value:,.4g} |" for name, value in numbers.items()]
    return lines


if __name__ == "__main__":
    main()
