"""Peak memory of the loss, forward and backward, against the number of anchors: it must grow with its inputs only.

    python benchmarks/loss_memory.py [--json memory.json]

Each line is measured in a process of its own, as the peak resident memory above what was there before the call. Logits
are made in slices, so what remains to grow are copies of the hidden states and of their gradient. Exits with 1 when a
row costs more than that.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

HIDDEN, VOCAB, BLOCK_SIZE, NUM_TEACHER_ROWS, NUM_LISTED = 32, 16_384, 8, 2_048, 32
ANCHORS = (128, 512, 1_024)
KINDS = ("ce", "kl-topk", "kl-hidden")
MAX_COPIES = 6
"""Copies of the hidden states that may live at once: gathered; gradient as kept, weighted, scattered; some spare."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "ANCHORS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one[0], int(arguments.one[1]))))
        return
    results = [measure_apart(kind, anchors) for kind in KINDS for anchors in ANCHORS]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(f"hidden {HIDDEN}, vocabulary {VOCAB:,}, blocks of {BLOCK_SIZE}, float32; MB")
    print("| loss | anchors | hidden states | all logits would be | peak of the loss |")
    print("|---|---|---|---|---|")
    for one in results:
        sizes = f"{one['input_mb']:.1f} | {one['logits_mb']:,.0f} | {one['peak_mb']:.0f}"
        print(f"| {one['kind']} | {one['anchors']:,} | {sizes} |")
    sys.exit(int(any(grows(results, kind) for kind in KINDS)))


def grows(results: list[dict[str, Any]], kind: str) -> bool:
    """True when the peak grows by more than copies of the inputs from the fewest to the most anchors."""
    first, *_, last = (one for one in results if one["kind"] == kind)
    return bool(last["peak_mb"] - first["peak_mb"] > MAX_COPIES * (last["input_mb"] - first["input_mb"]))


def measure_apart(kind: str, anchors: int) -> dict[str, Any]:
    """`measure` in a fresh process: resident memory only ever has one peak."""
    command = [sys.executable, __file__, "--one", kind, str(anchors)]
    done: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return done


def measure(kind: str, anchors: int) -> dict[str, Any]:
    """Peak of one loss of `anchors` blocks, forward and backward."""
    import torch

    from train.batches import TeacherRows
    from train.objective import OutputHead, block_loss
    from train.target_parts import FinalNorm
    from train.teacher import BlockTeacher

    torch.manual_seed(0)
    torch.set_num_threads(1)
    head = OutputHead(torch.randn(VOCAB, HIDDEN))
    rows = TeacherRows(hidden=torch.randn(NUM_TEACHER_ROWS, HIDDEN).bfloat16())
    if kind == "kl-topk":
        ids = torch.rand(NUM_TEACHER_ROWS, VOCAB // 16).topk(NUM_LISTED).indices
        logprobs = torch.randn(ids.shape).log_softmax(1) - 0.1
        rows = TeacherRows(None, ids.int(), logprobs)
    norm = FinalNorm(torch.ones(HIDDEN), 1e-6, adds_one=False)

    def run(num_anchors: int) -> None:
        hidden = torch.randn(num_anchors, BLOCK_SIZE, HIDDEN, requires_grad=True)
        labels = torch.randint(VOCAB, (num_anchors, BLOCK_SIZE))
        teacher = BlockTeacher(rows, torch.randint(NUM_TEACHER_ROWS, labels.shape), norm)
        kl_weight = 0.0 if kind == "ce" else 0.5
        output = block_loss(hidden, labels, torch.ones(labels.shape), head, teacher=teacher, kl_weight=kl_weight)
        torch.autograd.backward(output.loss)

    run(1)  # libraries load and threads start
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(anchors)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    num_slots = anchors * BLOCK_SIZE
    return {
        "kind": kind,
        "anchors": anchors,
        "input_mb": num_slots * HIDDEN * 4 / 1e6,
        "logits_mb": num_slots * VOCAB * 4 / 1e6,
        "peak_mb": peak * 1024 / 1e6,
    }


if __name__ == "__main__":
    main()
