"""The console line that scripts parse, and the metrics file."""

from __future__ import annotations

import re
from pathlib import Path

from train.metrics import Console, LoaderLoad, MetricsFile, StepMetrics, read_metrics

LINE = re.compile(
    r"\[\d\d:\d\d:\d\d\] step=(\d+) loss=(\S+) acc=(\S+) streak=(\S+) lr=(\S+) noise=(\S+) \| "
    r"rd=(\S+) b/s dft=(\S+) b/s \((\S+) Ktok/s\) \| q_read=\[(.*)\] q_pack=\[(.*)\] wait=(\S+)% \| "
    r"epoch~(\d+\.\d\d) ETA=(\S+)"
)


def metrics(step: int, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(
        step=step, epoch=0.25, loss=loss, acc=0.5, streak=1.75, lr=1e-3, noise=0.0, grad_norm=1.0,
        tokens=100, blocks=10, slots=70, unreadable=0, order_hash="0" * 16, source_tokens={"chats": 100}, seconds=0.1,
        validation=None,
    )  # fmt: skip


def test_console_line_has_the_format_that_scripts_parse() -> None:
    console = Console(total_steps=40, start_step=0)
    console.count(packs=4, tokens=2000)
    load = LoaderLoad(packs_read=4, read_ahead=3, packs_ready=2, wait_seconds=0.0)
    found = LINE.fullmatch(console.line(metrics(10), load))
    assert found is not None
    step, loss, acc, streak, lr, noise, read, drafted, rate, q_read, q_pack, wait, epoch, _ = found.groups()
    assert (step, loss, acc, streak, lr, noise) == ("10", "2.5000", "0.5000", "1.750", "1.00e-03", "0.000")
    assert (q_read, q_pack, wait, epoch) == ("3", "2", "0.0", "0.25")
    assert float(read) == float(drafted) > 0
    assert float(rate) > 0


def test_console_rates_start_anew_with_every_line() -> None:
    console = Console(total_steps=40, start_step=0)
    load = LoaderLoad(packs_read=0, read_ahead=0, packs_ready=0, wait_seconds=0.0)
    console.count(packs=4, tokens=2000)
    console.line(metrics(10), load)
    found = LINE.fullmatch(console.line(metrics(20), load))
    assert found is not None
    assert found[8] == "0.00"


def test_reopening_the_file_drops_later_steps_and_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, last_step=0) as first:
        for step in (1, 2, 3):
            first.write(metrics(step, loss=float(step)))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    with MetricsFile(path, last_step=2) as second:
        second.write(metrics(3, loss=30.0))
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]
