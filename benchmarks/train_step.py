"""One training step of the same small drafter, on the CPU: this project, SpecForge 0.2 and speculators 0.9.

    python benchmarks/train_step.py

Same tokens, features, initial weights, blocks, labels and loss for all (the printed losses must agree): 576 wide, 2
layers, 5 taps, 49,152 tokens of vocabulary, 2,048 context tokens in 8 documents, 128 and 512 blocks of 8. Each
contender runs in a process and an environment of its own, which is made when it is missing: the package from the
package index without its serving engines, and the torch that runs this script. Then: where the time of our step goes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from step_ours import draw_anchors
from step_problem import Problem, make_tensors

HERE = Path(__file__).resolve().parent
TORCH = f"torch=={torch.__version__.split('+')[0]}"
# (what is installed with its dependencies, what is installed without). What they need beyond torch and transformers to
# import their training code; the rest is for serving, logging and data preparation.
PACKAGES = {
    "specforge": ([TORCH, "numpy", "transformers==5.8.1"], ["specforge==0.2.0"]),
    "speculators": (
        [
            *(TORCH, "numpy<=2.5.4", "transformers>=5.0,<=5.19", "datasets>=4,<=5.1", "loguru", "openai>=2", "psutil"),
            *("aiohttp", "pydantic", "pydantic-settings", "rich", "typer"),
        ],
        ["speculators==0.9.0", "hs-connectors==0.9.0"],
    ),
}
OURS = "ours"


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-offline" / "train-step"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, default=cache, help="folder for the others' environments (2.5 GB)")
    parser.add_argument("--out", type=Path, default=Path("train-step.json"), help="file for all numbers")
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 512], help="blocks of a step, multiples of 8")
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--steps", type=int, default=7, help="steps that are timed; the median is shown")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="compute threads")
    parser.add_argument("--only", nargs="+", choices=[OURS, *PACKAGES], default=[OURS, *PACKAGES])
    arguments = parser.parse_args()
    programs = {name: python for name in arguments.only if (python := interpreter(name, arguments.envs)) is not None}
    results: list[dict[str, Any]] = []
    profiles: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for precision in arguments.precision:
            for num_blocks in arguments.blocks:
                file = Path(scratch) / "problem.json"
                make_problem(precision, num_blocks, arguments.steps).save(file)
                about = {"precision": precision, "blocks": num_blocks}
                for name, python in programs.items():
                    measured = call(python, HERE / f"step_{name}.py", file, arguments.threads)
                    results.append({"contender": name, **about, **measured})
                if OURS in programs and num_blocks == arguments.blocks[0]:
                    parts = call(programs[OURS], HERE / "step_profile.py", file, arguments.threads)
                    profiles.append({**about, "parts": parts})
    arguments.out.write_text(json.dumps({"results": results, "profiles": profiles}, indent=1), encoding="utf-8")
    print_results(results)
    print_profiles(profiles)


def make_problem(precision: str, num_blocks: int, timed_steps: int) -> Problem:
    """A problem with the anchors that our own sampling draws: as many in each document."""
    problem = Problem(precision=precision, num_blocks=num_blocks, anchors=[])
    num_steps = problem.warmup_steps + timed_steps
    return dataclasses.replace(problem, anchors=draw_anchors(problem, make_tensors(problem), num_steps))


def interpreter(name: str, envs: Path) -> str | None:
    """The python of a contender's environment, made on first use; None, after a message, when that is impossible."""
    if name == OURS:
        return sys.executable
    python = envs / name / "bin" / "python"
    stamp = envs / name / "installed.json"
    wanted = json.dumps(PACKAGES[name])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return str(python)
    print(f"Setting up {envs / name} (a minute or two) ...", file=sys.stderr, flush=True)
    with_dependencies, alone = PACKAGES[name]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(envs / name)],
            [*pip, *with_dependencies],
            [*pip, "--no-deps", *alone],
        ):
            subprocess.run(command, check=True, text=True, stderr=subprocess.PIPE)
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no reason given")
        print(f"{name} is left out, its environment could not be made: {reason}", file=sys.stderr)
        return None
    stamp.write_text(wanted, encoding="utf-8")  # exists = everything before it worked
    return str(python)


def call(python: str, program: Path, problem: Path, threads: int) -> Any:
    """Runs a program in a fresh process; returns the JSON of its last line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "PYTHON"))}
    environment |= {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    print(f"{program.stem} ...", file=sys.stderr, flush=True)
    words = [python, str(program), str(problem), str(threads)]
    done = subprocess.run(words, env=environment, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{program.name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def print_results(results: list[dict[str, Any]]) -> None:
    print("| precision | blocks | contender | s per step (range) | CPU s | peak memory | at rest | first, last loss |")
    print("|---|---|---|---|---|---|---|---|")
    for one in results:
        print(
            f"| {one['precision']} | {one['blocks']} | {one['contender']} "
            f"| **{one['seconds']:.3f}** ({one['fastest']:.3f}-{one['slowest']:.3f}) | {one['cpu_seconds']:.2f} "
            f"| {one['peak_bytes'] / 1e9:.2f} GB | {one['resting_bytes'] / 1e9:.2f} GB "
            f"| {one['losses'][0]:.4f}, {one['losses'][-1]:.4f} |"
        )
    print()
    for precision, num_blocks in sorted({(one["precision"], one["blocks"]) for one in results}):
        group = {
            one["contender"]: one for one in results if (one["precision"], one["blocks"]) == (precision, num_blocks)
        }
        ours, others = group.pop(OURS, None), list(group.values())
        if ours is None or not others:
            continue
        fastest = min(others, key=lambda one: float(one["seconds"]))
        leanest = min(others, key=lambda one: float(one["peak_bytes"]))
        print(
            f"{precision}, {num_blocks} blocks of {ours['slots']} slots with loss: "
            f"{fastest['seconds'] / ours['seconds']:.2f} x as fast as {fastest['contender']}, "
            f"{ours['peak_bytes'] / leanest['peak_bytes']:.2f} of the peak memory of {leanest['contender']}"
        )


def print_profiles(profiles: list[dict[str, Any]]) -> None:
    for profile in profiles:
        print(f"\n| {profile['precision']}, {profile['blocks']} blocks: part of our step | s | products alone, s |")
        print("|---|---|---|")
        for row in profile["parts"]:
            limit = "" if row["limit"] is None else f"{row['limit']:.3f}"
            print(f"| {row['part']} | {row['seconds']:.3f} | {limit} |")


if __name__ == "__main__":
    main()
