"""Trains the demo's drafter from stores of every codec, same seeds, and compares what the drafters are worth.

    python benchmarks/codec_quality.py --target demo/target --out demo/codecs

Needs the target of a finished `make demo`. Every part resumes; a finished one is not done again. Drafters are judged
on the held-out conversations of a lossless store: the target's own greedy answers, so their acceptance length is what
speculative decoding would give. Differences are paired: a codec against bf16 with the same seed, which sees the same
packs, anchors and starting weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "smollm2"
SCRIPTS = Path(sys.executable).parent
CODECS = ("bf16", "int8", "fp8", "int4")
MEASURES = ("loss", "acceptance_length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="the demo's target")
    parser.add_argument("--out", type=Path, required=True, help="folder for stores, runs and results.json")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS, help="bf16 is always among them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training per codec and seed")
    parser.add_argument("--steps", type=int, default=2800, help="steps of each training; the demo's number")
    parser.add_argument("--limit", type=int, default=2000, help="conversations to train on; the demo's number")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each part")
    parser.add_argument("--jobs", type=int, default=1, help="trainings and evaluations side by side")
    arguments = parser.parse_args()
    codecs = [codec for codec in CODECS if codec == "bf16" or codec in arguments.codecs]
    held_out = store(arguments, "bf16", "heldout")
    stores = {codec: store(arguments, codec, "train") for codec in codecs}
    wanted = [(codec, seed) for seed in arguments.seeds for codec in codecs]
    with ThreadPoolExecutor(arguments.jobs) as jobs:
        parts = [jobs.submit(measure, arguments, codec, seed, stores[codec], held_out) for codec, seed in wanted]
        results = [part.result() for part in parts]
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("\n".join(table(results)))


def store(arguments: argparse.Namespace, codec: str, part: str) -> Path:
    """The store of one codec; the target runs anew for each, as a user's would."""
    path: Path = arguments.out / f"{part}-{codec}.zarr"
    command = ["dflash-precompute", "run", "--config", EXAMPLE / "short" / "precompute.yaml", "--codec", codec]
    command += ["--target", arguments.target, "--data", EXAMPLE / f"{part}.jsonl", "--store", path]
    command += ["--limit", arguments.limit, "--workers", 1, "--threads", arguments.threads]
    call(command)
    return path


def measure(arguments: argparse.Namespace, codec: str, seed: int, stored: Path, held_out: Path) -> dict[str, Any]:
    """Trains and evaluates with one codec and one seed; all other settings are the demo's."""
    run = arguments.out / f"{codec}-{seed}"
    report = run / "eval.json"
    train = ["dflash-train", "run", "--config", EXAMPLE / "short" / "train.yaml"]
    train += ["--store", stored, "--init-target", arguments.target, "--out", run]
    train += ["--seed", seed, "--steps", arguments.steps, "--threads", arguments.threads]
    if not report.exists() or num_steps(run) != arguments.steps:
        call(train)
        evaluate = ["dflash-train", "eval", "--store", held_out, "--drafter", run, "--threads", arguments.threads]
        report.write_text(call([*evaluate, "--json"]), encoding="utf-8")
    found = json.loads(report.read_text(encoding="utf-8"))
    last = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-200:]
    return {
        "codec": codec,
        "seed": seed,
        "training_loss": float(np.mean([json.loads(line)["loss"] for line in last])),
        **{name: found[name] for name in MEASURES},
    }


def num_steps(run: Path) -> int:
    """Steps that a training has made."""
    last = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return int(json.loads(last)["step"])


def table(results: list[dict[str, Any]]) -> list[str]:
    """Means over seeds, and paired differences to bf16 with the standard error of their mean."""
    lines = [
        "| codec | training loss (last 200) | held-out loss | difference to bf16 | acceptance length | difference |",
        "|---|---|---|---|---|---|",
    ]
    by_run = {(one["codec"], one["seed"]): one for one in results}
    seeds = sorted({one["seed"] for one in results})
    for codec in dict.fromkeys(one["codec"] for one in results):
        mine = [by_run[codec, seed] for seed in seeds]
        cells = [codec, f"{np.mean([one['training_loss'] for one in mine]):.3f}"]
        for name in MEASURES:
            values = np.array([one[name] for one in mine])
            pairs = values - np.array([by_run["bf16", seed][name] for seed in seeds])
            error = pairs.std(ddof=1) / np.sqrt(len(pairs)) if len(pairs) > 1 else float("nan")
            spread = values.std(ddof=1) if len(values) > 1 else float("nan")
            cells.append(f"{values.mean():.3f} (spread {spread:.3f})")
            share = 100 * pairs.mean() / values.mean()
            cells.append("-" if codec == "bf16" else f"{pairs.mean():+.4f} +- {error:.4f} ({share:+.2f} %)")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def call(command: list[Any]) -> str:
    """Runs one of our commands, its progress visible; returns its standard output."""
    words = [str(word) for word in command]
    print("$", *words, file=sys.stderr, flush=True)
    words[0] = str(SCRIPTS / words[0])
    return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    main()
