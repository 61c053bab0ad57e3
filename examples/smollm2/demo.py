"""The whole path on a real 135M chat model: plan, precompute, train, evaluate, export; ends with a table.

Every stage is one of the project's commands, shown as it is run; all of them resume, so an interrupted demo goes on
where it was, and a finished one only prints its table again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plot import draw  # beside this file

HERE = Path(__file__).resolve().parent
# Scripts of the environment that runs this file, whether or not it is activated.
SCRIPTS = Path(sys.executable).parent
RECIPES: Mapping[str, Mapping[str, int]] = {
    "short": {"speed_prompts": 32, "proof_prompts": 6, "untrained_prompts": 6, "max_new_tokens": 64},
    "long": {"speed_prompts": 64, "proof_prompts": 16, "untrained_prompts": 8, "max_new_tokens": 128},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="short", help="length of the training")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for everything the demo makes")
    arguments = parser.parse_args()
    demo = Demo(arguments.recipe, arguments.out)
    try:
        demo.run()
    except subprocess.CalledProcessError as error:
        sys.exit(f"the demo stopped: `{shlex.join(map(str, error.cmd))}` exited with {error.returncode}")


class Demo:
    """One recipe and the folder it writes to."""

    def __init__(self, recipe: str, out: Path) -> None:
        self.recipe = RECIPES[recipe]
        self.configs = HERE / recipe
        self.target = out / "target"
        self.store = out / recipe / "store.zarr"
        self.trained, self.untrained = out / recipe / "train", out / recipe / "untrained"
        self.exported = out / recipe / "drafter"
        self.reports = out / recipe / "reports"
        self.picture = out / recipe / "demo.png"

    def run(self) -> None:
        """All stages, then the table."""
        start = time.monotonic()
        self.reports.mkdir(parents=True, exist_ok=True)
        execute("1/6 target", [sys.executable, HERE / "convert_target.py", self.target])
        precompute = [
            "--config",
            self.configs / "precompute.yaml",
            "--target",
            self.target,
            "--store",
            self.store,
        ]
        precompute += ["--data", HERE / "train.jsonl"]
        execute("2/6 plan", [SCRIPTS / "dflash-precompute", "plan", *precompute])
        stored = self.report("precompute", ["dflash-precompute", "run", *precompute, "--json"], "3/6 precompute")
        train = ["--config", self.configs / "train.yaml", "--store", self.store, "--init-target", self.target]
        execute("4/6 train", [SCRIPTS / "dflash-train", "run", *train, "--out", self.trained])
        execute(
            "    untrained",
            [SCRIPTS / "dflash-train", "run", *train, "--out", self.untrained, "--steps", "0"],
        )
        execute("5/6 export", [SCRIPTS / "dflash-train", "export", "--run", self.trained, "--out", self.exported])
        speed = self.evaluate("speed", self.exported, "bfloat16", self.recipe["speed_prompts"])
        proof = self.evaluate("proof", self.exported, "float32", self.recipe["proof_prompts"])
        before = self.evaluate("untrained", self.untrained, "bfloat16", self.recipe["untrained_prompts"])
        draw(self.trained / "metrics.jsonl", speed, before, self.picture)
        print_table(self.rows(stored, speed, proof, before), seconds=time.monotonic() - start)

    def evaluate(self, name: str, drafter: Path, dtype: str, max_prompts: int) -> dict[str, Any]:
        command = ["dflash-train", "eval", "--target", self.target, "--drafter", drafter, "--dtype", dtype]
        command += ["--prompts", HERE / "heldout.jsonl", "--max-prompts", max_prompts, "--json"]
        command += ["--max-new-tokens", self.recipe["max_new_tokens"]]
        if name == "untrained":
            command.append("--no-plain")
        return self.report(f"eval-{name}", command, f"6/6 evaluate ({name}, {dtype})")

    def report(self, name: str, command: list[Any], title: str) -> dict[str, Any]:
        """What a command prints with --json. The report of an earlier run of the same command is used again."""
        path, words = self.reports / f"{name}.json", [str(word) for word in command]
        if path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            if earlier["command"] == words:
                return dict(earlier["report"])
        report: dict[str, Any] = json.loads(execute(title, [SCRIPTS / words[0], *words[1:]], capture=True))
        path.write_text(json.dumps({"command": words, "report": report}, indent=1), encoding="utf-8")
        return report

    def rows(
        self, stored: Mapping[str, Any], speed: Mapping[str, Any], proof: Mapping[str, Any], before: Mapping[str, Any]
    ) -> list[tuple[str, str]]:
        """(label, value) of every line of the table, from the reports of the commands."""
        trained = json.loads((self.trained / "summary.json").read_text(encoding="utf-8"))
        return [
            ("tokens stored", f"{stored['tokens']:,} in {stored['samples']:,} conversations"),
            ("bytes per token", f"{stored['bytes_per_token']:,.0f}, {stored['ratio']:.2f}x smaller than plain bf16"),
            ("precompute", f"{stored['ktok_per_second']:.2f} Ktok/s"),
            ("training", f"{trained['tokens_per_second'] / 1000:.2f} Ktok/s, {trained['steps']:,} steps"),
            ("loss", f"{trained['first_loss']:.3f} -> {trained['last_loss']:.3f}"),
            ("acceptance length, untrained", f"{before['acceptance_length']:.2f}"),
            (
                "acceptance length, held-out",
                f"{speed['acceptance_length']:.2f} (mean over {speed['num_prompts']} requests), "
                f"{speed['acceptance_length_pooled']:.2f} (pooled)",
            ),
            (
                "speed, bf16, batch 1",
                f"{speed['plain_tokens_per_second']:.1f} -> {speed['tokens_per_second']:.1f} tok/s "
                f"({speed['speedup']:.2f}x)",
            ),
            ("greedy output, fp32", f"{proof['identical']} of {proof['num_prompts']} identical"),
            ("picture", str(self.picture)),
            ("exported drafter", str(self.exported)),
        ]


def execute(title: str, command: list[Any], *, capture: bool = False) -> str:
    """Shows and runs a command; returns its standard output if `capture`. Raises CalledProcessError if it fails."""
    words = [str(word) for word in command]
    if title:
        print(f"\n== {title}\n$ {shlex.join([Path(words[0]).name, *words[1:]])}", flush=True)
    done = subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE if capture else None, env=os.environ)
    return done.stdout or ""


def print_table(rows: list[tuple[str, str]], *, seconds: float) -> None:
    width = max(len(label) for label, _ in rows)
    print(f"\n== Result ({seconds / 60:.1f} minutes)")
    for label, value in rows:
        print(f"{label:<{width}}  {value}")


if __name__ == "__main__":
    main()
