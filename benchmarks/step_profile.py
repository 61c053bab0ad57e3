"""Where the time of our training step goes: `python step_profile.py problem.json threads` prints JSON.

Parts in seconds of one step, and next to the matrix products how long products of the same shapes take by themselves.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from step_ours import prepare
from step_problem import Problem, make_tensors
from torch.profiler import profile, record_function

REPEATS = 5


def main() -> None:
    problem = Problem.load(Path(sys.argv[1]))
    torch.set_num_threads(int(sys.argv[2]))
    step = prepare(problem, make_tensors(problem))
    for number in range(problem.warmup_steps):
        step(number)
    timed = range(problem.warmup_steps, len(problem.anchors))
    with profile(record_shapes=True) as profiled:
        for number in timed:
            with record_function("whole step"):
                step(number)
    events = list(profiled.key_averages(group_by_input_shape=True))
    print(json.dumps(parts_of(problem, events, len(timed))))


def parts_of(problem: Problem, events: list[Any], num_steps: int) -> list[dict[str, Any]]:
    """Rows {part, seconds, limit}; `limit` is None for what is no matrix product. They sum to the whole step."""

    def seconds(chosen: Iterable[Any], field: str = "self_cpu_time_total") -> float:
        return float(sum(getattr(event, field) for event in chosen)) / 1e6 / num_steps

    products = [event for event in events if event.key == "aten::mm"]
    head = [event for event in products if _touches_logits(problem, event)]
    drafter = [event for event in products if not _touches_logits(problem, event)]
    passes = [event for event in events if event not in products and _touches_logits(problem, event)]
    rows = [
        ("output head: matrix products", seconds(head), _alone(problem, head, num_steps)),
        ("output head: passes over the logits", seconds(passes), None),
        ("drafter: matrix products", seconds(drafter), _alone(problem, drafter, num_steps)),
    ]
    for name, keys in (
        ("attention", ("_TwoPart", "_TwoPartBackward")),
        ("norms", ("_Norm", "_NormBackward")),
        ("optimiser", ("Optimizer.step#AdamW.step",)),
    ):
        found = [event for event in events if event.key in keys]
        assert found, f"no event of {keys} was recorded: the code has other names now"
        rows.append((name, seconds(found, "cpu_time_total"), None))
    whole = seconds([event for event in events if event.key == "whole step"], "cpu_time_total")
    rows.append(("rest", whole - sum(row[1] for row in rows), None))
    rows.append(("whole step", whole, None))
    return [{"part": part, "seconds": taken, "limit": limit} for part, taken, limit in rows]


def _touches_logits(problem: Problem, event: Any) -> bool:
    """True for operations on [rows, V] and on [H, V]; the embedding is [V, H]."""
    return any(len(shape) == 2 and shape[-1] == problem.vocab_size for shape in event.input_shapes)


def _alone(problem: Problem, products: list[Any], num_steps: int) -> float:
    """Seconds of one step for the same products on matrices that lie in order, with nothing else between them."""
    total = 0.0
    for event in products:
        left, right = [torch.randn(shape).to(problem.compute_dtype) for shape in event.input_shapes[:2]]
        total += _median_seconds(lambda left=left, right=right: left @ right) * event.count / num_steps  # type: ignore[misc]
    return total


def _median_seconds(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
