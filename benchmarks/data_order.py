"""Trains the demo's drafter with several data orders, same seeds and same tokens, and shows what the loss does.

    python benchmarks/data_order.py --demo demo/long --target demo/target --out demo/data-order

Needs the store and the target of a finished `make demo-long` (`make demo` and `--demo demo/short` will do). Every part
resumes; a finished one is not done again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from loss_folding import Fold, chunk_clock, fold, in_whole_chunks, power_at_clock, rest_of_trend
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "smollm2"
SCRIPTS = Path(sys.executable).parent
ORDERS = ("sorted-chunks", "bucketed", "global")
VALIDATION_SHARE = 0.1
BLOCKS_PER_SUPERVISED = 0.25
"""Share of the possible blocks of the validation samples that the held-out loss is taken over."""
NUM_SHOWN_STEPS = 75

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Outcome:
    """One finished training run."""

    order: str
    seed: int
    losses: Floats
    """Of every step."""
    clock: Ints
    """[steps, 2] place in the chunk, and packs of the chunk: of the run itself if its order has chunks, else of
    `sorted-chunks` with the same seed, as a control."""
    num_tokens: int
    held_out_loss: float
    acceptance: dict[str, Any]

    def examined(self) -> tuple[Floats, Ints]:
        """The loss without its trend, and the clock: from a third on, since it falls too steeply before, and without
        the one or two packs that are an epoch's last chunk."""
        first = len(self.losses) // 3
        rest, clock = rest_of_trend(self.losses[first:]), self.clock[first:]
        whole = in_whole_chunks(clock)
        return rest[whole], clock[whole]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True, help="folder of a finished demo, with its store.zarr")
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs, results.json and data-order.png")
    parser.add_argument("--epochs", type=float, default=3.0, help="passes over the store, the same for every order")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training per order and seed")
    parser.add_argument("--token-budget", type=int, default=6144, help="tokens of a pack, which is a step")
    parser.add_argument("--anchors", type=int, default=288, help="blocks of a step")
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts for the acceptance length")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    arguments = parser.parse_args()
    outcomes = [outcome(arguments, order, seed) for seed in arguments.seeds for order in ORDERS]
    by_order = {order: [one for one in outcomes if one.order == order] for order in ORDERS}
    results = {order: summary(runs) for order, runs in by_order.items()}
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    draw(by_order, arguments.out / "data-order.png")
    print("\n".join(table(results)))


def outcome(arguments: argparse.Namespace, order: str, seed: int) -> Outcome:
    """Trains and evaluates with one order and one seed; all other settings are those of `make demo`."""
    from train.metrics import read_metrics

    run = arguments.out / f"{order}-{seed}"
    plan = plan_of(arguments, order, seed)
    num_steps = max(1, int(arguments.epochs * plan.window_packs(0, 0).num_packs))
    train = [SCRIPTS / "dflash-train", "run", "--config", EXAMPLE / "short" / "train.yaml", "--order", order]
    train += ["--store", arguments.demo / "store.zarr", "--init-target", arguments.target]
    train += ["--out", run, "--seed", seed, "--steps", num_steps, "--validation-share", VALIDATION_SHARE]
    train += ["--token-budget", arguments.token_budget, "--anchors-per-step", arguments.anchors]
    call([*train, "--threads", arguments.threads, "--keep-checkpoints", 1, "--validate-every", 0])
    report = run / "eval.json"
    if not report.exists():
        evaluate = [SCRIPTS / "dflash-train", "eval", "--target", arguments.target, "--drafter", run]
        evaluate += ["--prompts", EXAMPLE / "heldout.jsonl", "--max-prompts", arguments.prompts, "--dtype", "bfloat16"]
        evaluate += ["--max-new-tokens", 48, "--no-plain", "--threads", arguments.threads, "--json"]
        report.write_text(call(evaluate), encoding="utf-8")
    held_out = run / "heldout.json"
    if not held_out.exists():
        held_out.write_text(json.dumps(held_out_loss(run, arguments.demo / "store.zarr")), encoding="utf-8")
    lines = read_metrics(run / "metrics.jsonl")
    return Outcome(
        order=order,
        seed=seed,
        losses=np.array([line["loss"] for line in lines]),
        clock=chunk_clock(plan_of(arguments, "sorted-chunks", seed), len(lines)),
        num_tokens=sum(line["tokens"] for line in lines),
        held_out_loss=json.loads(held_out.read_text(encoding="utf-8")),
        acceptance=json.loads(report.read_text(encoding="utf-8")),
    )


def plan_of(arguments: argparse.Namespace, order: str, seed: int) -> Any:
    """The plan of packs that such a run follows: its own code makes it."""
    from cache_tools.reader import Store
    from train.config import TrainConfig
    from train.loader import pack_plan
    from train.selection import training_samples

    store = Store.open(arguments.demo / "store.zarr")
    config = TrainConfig(store=store.path, out=arguments.out, mask_token_id=5, validation_share=VALIDATION_SHARE)
    return pack_plan(
        store,
        seed=seed,
        token_budget=arguments.token_budget,
        packs_per_step=1,
        samples=training_samples(config, store),
        order=order,
    )


def held_out_loss(run: Path, store_path: Path) -> float:
    """Mean weighted loss of the run's drafter over blocks of the conversations it was not trained on, nats."""
    import torch

    from cache_tools.reader import Store
    from cache_tools.settings import load_config
    from train.config import TrainConfig
    from train.held_out import group_samples, read_packs
    from train.held_out_loss import held_out_sums
    from train.objective import BlockSums
    from train.selection import training_samples
    from train.state import prepare

    state = prepare(load_config(TrainConfig, run / "config.yaml", {}), lambda _: None)
    config, store = state.config, Store.open(store_path)
    held_out = np.setdiff1d(np.arange(store.num_samples), training_samples(config, store))
    sums = BlockSums.zero(config.block_size, state.device)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for pack in read_packs(store, group_samples(store, held_out), state.layer_ids):
            sums += held_out_sums(
                state.drafter,
                pack.tapped.to_features(state.device, state.compute_dtype, state.feature_scale),
                pack,
                embed=state.embed,
                head=state.head,
                anchors_per_supervised=BLOCKS_PER_SUPERVISED,
                gamma=config.slot_gamma,
            )
    return sums.mean_loss


def summary(runs: Sequence[Outcome]) -> dict[str, Any]:
    """What the table shows of one order, over its seeds."""
    examined = [run.examined() for run in runs]
    folded = pooled_fold(runs)
    power, p = power_at_clock(examined)
    acceptance = [run.acceptance["acceptance_length"] for run in runs]
    return {
        "steps": [len(run.losses) for run in runs],
        "tokens": [run.num_tokens for run in runs],
        "last_loss": [float(run.losses[-50:].mean()) for run in runs],
        "deviation": float(np.concatenate([rest for rest, _ in examined]).std()),
        "fold": folded.mean.tolist(),
        "fold_error": folded.error.tolist(),
        "fold_range": float(np.ptp(folded.mean)),
        "fold_range_error": float(np.hypot(*folded.error[[folded.mean.argmax(), folded.mean.argmin()]])),
        "power_at_the_period": power,
        "p_of_the_power": p,
        "held_out_loss": [run.held_out_loss for run in runs],
        "acceptance_length": acceptance,
        "acceptance_length_pooled": [run.acceptance["acceptance_length_pooled"] for run in runs],
    }


def pooled_fold(runs: Sequence[Outcome]) -> Fold:
    """The loss without its trend by place in the chunk, over all seeds."""
    rest, clock = (np.concatenate(parts) for parts in zip(*(run.examined() for run in runs), strict=True))
    return fold(rest, clock)


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [
        "| order | steps | loss, last 50 steps | deviation of the step loss | range of the fold "
        "| power at the period (p) | held-out loss | acceptance length | pooled |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for order, one in results.items():
        cells = [order, f"{np.mean(one['steps']):.0f}", over_seeds(one["last_loss"]), f"{one['deviation']:.3f}"]
        cells += [f"{one['fold_range']:.2f} ± {one['fold_range_error']:.2f}"]
        cells += [f"{one['power_at_the_period']:.1f} ({one['p_of_the_power']:.2g})"]
        cells += [over_seeds(one[name]) for name in ("held_out_loss", "acceptance_length", "acceptance_length_pooled")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def over_seeds(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def draw(by_order: dict[str, list[Outcome]], path: Path) -> None:
    """Above, a stretch of the loss of the first seed; below, the loss folded by place in the chunk, all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(by_order), figsize=(12, 5.4), layout="constrained", sharey="row")
    for column, (order, runs) in enumerate(by_order.items()):
        above, below = axes[:, column]
        color = "#1a7f37" if order == "global" else "#b35900"
        run = runs[0]
        steps = np.arange(len(run.losses))[-NUM_SHOWN_STEPS:]
        if order == "sorted-chunks":
            for start in steps[run.clock[steps, 0] == 0]:
                above.axvline(start + 0.5, color="0.8", linewidth=1)
            last = steps[run.clock[steps, 0] == run.clock[steps, 1] - 1]
            above.plot(last + 1, run.losses[last], "o", color="black", fillstyle="none", markersize=8)
        above.plot(steps + 1, run.losses[steps], color=color, linewidth=1.3, marker=".", markersize=4)
        rings = "; a line: a new chunk begins, a ring: its last pack" if order == "sorted-chunks" else ""
        above.set(title=order, xlabel="step" + rings)
        folded = pooled_fold(runs)
        below.axhline(0, color="0.8", linewidth=1)
        places = np.arange(1, len(folded.mean) + 1)
        below.errorbar(places, folded.mean, 2 * folded.error, color=color, marker="o", markersize=4, capsize=3)
        clock = "place in the chunk" if order == "sorted-chunks" else "the same clock, for comparison"
        below.set(xlabel=clock, xticks=places)
    axes[0, 0].set_ylabel("training loss (nats)")
    axes[1, 0].set_ylabel("loss - trend, all seeds\n(bars: 2 standard errors)")
    figure.savefig(path, dpi=110)


def call(command: Sequence[Any]) -> str:
    """Runs a command, its progress visible; returns its standard output."""
    words = [str(word) for word in command]
    print("$", " ".join([Path(words[0]).name, *words[1:]]), file=sys.stderr, flush=True)
    return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    main()
