"""The command `dflash-cache`: look into a store, check it, and compare ways to batch it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cache_tools.errors import ConfigError
from cache_tools.settings import CommandGroup

if TYPE_CHECKING:
    from cache_tools.inspection import SampleText

_store_argument = click.argument("store", type=click.Path(path_type=Path))
_json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


class _FiniteRange(click.FloatRange):
    """Finite numbers of a range: NaN passes the comparisons of the ordinary one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dflash-offline")
def main() -> None:
    """Look into a store of hidden states, check it, and compare ways to batch it."""


@main.command()
@_store_argument
@_json_flag
def info(store: Path, as_json: bool) -> None:
    """What STORE holds, how large it is, and whether it is complete."""
    from cache_tools.inspection import describe, summary_lines
    from cache_tools.reader import Store

    summary = describe(Store.open(store))
    click.echo(json.dumps(summary, indent=2) if as_json else "\n".join(summary_lines(summary)))


@main.command()
@_store_argument
@click.option(
    "--sample-rate",
    type=_FiniteRange(min=0, min_open=True, max=1),
    help="Read only this share of the chunks, chosen by --seed. All else is checked: files, sizes, seals, indexes.",
)
@click.option("--seed", type=int, default=0, help="Seed of the choice; another one reads other chunks.  [default: 0]")
@_json_flag
def verify(store: Path, sample_rate: float | None, seed: int, as_json: bool) -> None:
    """Check every file of STORE against its checksum; exit 1 if anything is wrong.

    Each finding names the file, and where known the shard and the samples that are damaged. A store that is being
    written at the moment has findings of the kinds "temporary" and "unsealed".
    """
    from cache_tools import integrity
    from cache_tools.progress import progress_bar

    answer: dict[str, Any] = {}
    with progress_bar(total=integrity.num_bytes_to_verify(store), unit="B", desc="verify") as progress:
        if sample_rate is None:
            findings = integrity.verify(store, progress)
            fine = "every file matches its checksum"
        else:
            checked = integrity.spot_check(store, sample_rate, seed=seed, progress=progress)
            findings = checked.findings
            answer = {"bytes_read": checked.bytes_read, "bytes_total": checked.bytes_total}
            fine = f"every file is there, and the {checked.share:.1%} of all bytes that were read match their checksums"
    if as_json:
        answer |= {"ok": not findings, "findings": [item.to_dict() for item in findings]}
        click.echo(json.dumps(answer, indent=2))
    else:
        for finding in findings:
            click.echo(str(finding))
        click.echo(f"{len(findings)} findings" if findings else f"ok: {fine}{_unfinished(store)}")
    sys.exit(1 if findings else 0)


@main.command()
@_store_argument
@click.argument("sample", type=int)
@_json_flag
def show(store: Path, sample: int, as_json: bool) -> None:
    """The text of one SAMPLE of STORE, with the supervised tokens marked.

    Supervised text is green on a terminal, and stands between ⟦ and ⟧ elsewhere.
    """
    from cache_tools.inspection import read_text
    from cache_tools.reader import Store

    text = read_text(Store.open(store), sample)
    if as_json:
        click.echo(json.dumps(text.to_dict(), indent=2, ensure_ascii=False))
    else:
        click.echo(_marked(text))


@main.command()
@click.argument("store", type=click.Path(path_type=Path), metavar="STORE|TARGET")
@_json_flag
def codecs(store: Path, as_json: bool) -> None:
    """What each codec would cost and lose on the hidden states of STORE, which must be lossless (bf16 or raw).

    Measured on at most 64 samples, with channel scales from 64 others. For the folder of a TARGET it says how to do
    the same without a store.
    """
    from cache_tools import codec_report
    from cache_tools.progress import progress_bar
    from cache_tools.reader import Store

    codec_report.require_store(store)
    with progress_bar(total=None, unit="samples", desc="codecs") as progress:
        report = codec_report.compare_in_store(Store.open(store), progress)
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else "\n".join(codec_report.table_lines(report)))


def _unfinished(path: Path) -> str:
    """What a sound store still lacks; empty for a complete one."""
    from cache_tools.reader import Store

    store = Store.open(path)
    return "" if store.complete else f", but only {len(store.sealed)} of {store.num_shards} shards are computed"


@main.command()
@click.argument("store", type=click.Path(path_type=Path), required=False)
@click.option(
    "--lengths",
    type=click.Path(path_type=Path),
    help="Instead of STORE: a text file with one length per line, or .npy.",
)
@click.option("--strategy", default="all", help="One strategy by name, or all.  [default: all]")
@click.option("--token-budget", type=int, default=49152, help="Most tokens in a pack.  [default: 49152]")
@click.option("--epochs", type=int, default=2, help="Epochs to measure; co_occurrence needs two.  [default: 2]")
@click.option("--packs-per-step", type=int, default=8, help="Packs of an optimizer step.  [default: 8]")
@click.option("--seed", type=int, default=0, help="Seed of the order.  [default: 0]")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Also draw a picture to this .png file; needs matplotlib."
)
@_json_flag
def packs(
    store: Path | None,
    lengths: Path | None,
    strategy: str,
    token_budget: int,
    epochs: int,
    packs_per_step: int,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Compare ways to batch the samples of STORE: how full, how random, how well balanced.

    Random order has z_var 1, ks 0.84, lag1 0, no period, co_occurrence 1. A z_var of 20 means batches sorted by length.
    With fewer than ten samples in a batch, or only a few different lengths, compare z_var with that of next-fit.
    """
    from cache_tools import pack_report
    from cache_tools.progress import progress_bar

    if (store is None) == (lengths is None):
        raise ConfigError(
            "Packs are made from a store or from a file of lengths.",
            got="neither" if store is None else "both",
            expected="STORE, or --lengths FILE",
        )
    if plot is not None:
        from cache_tools.pack_pictures import check_can_draw

        check_can_draw(plot)
    found = pack_report.store_lengths(store) if store is not None else pack_report.read_lengths(Path(lengths or ""))
    with progress_bar(total=None, unit="samples", desc="packs") as progress:
        comparisons = pack_report.compare(
            found,
            strategy,
            token_budget=token_budget,
            num_epochs=epochs,
            packs_per_step=packs_per_step,
            seed=seed,
            progress=progress,
        )
    if plot is not None:
        from cache_tools.pack_pictures import draw_comparison

        draw_comparison(comparisons, found, plot)
    settings = {"token_budget": token_budget, "epochs": epochs, "packs_per_step": packs_per_step, "seed": seed}
    if as_json:
        click.echo(json.dumps(pack_report.to_json(comparisons, found, dict(settings)), indent=2))
    else:
        click.echo("\n".join(pack_report.table_lines(comparisons)))


@main.command()
@_store_argument
@click.option("--seconds", type=_FiniteRange(min=0.1), default=10.0, help="How long to read.  [default: 10]")
@click.option(
    "--threads", type=click.IntRange(min=1), default=4, help="Threads, as --reader-threads in training.  [default: 4]"
)
@click.option("--token-budget", type=int, default=49152, help="Most tokens in a pack.  [default: 49152]")
@click.option("--no-teacher", is_flag=True, help="Leave out what --teacher kept, as training with --kl-weight 0 does.")
@click.option("--cold", is_flag=True, help="Drop the store's files from the page cache before.")
@click.option(
    "--gpu-tokens-per-second",
    type=_FiniteRange(min=1),
    default=20_000,
    help="What one GPU trains. The default is arithmetic for a 27B target on an H100, not a measurement; training "
    "prints what yours does.  [default: 20000]",
)
@_json_flag
def bench(
    store: Path,
    seconds: float,
    threads: int,
    token_budget: int,
    no_teacher: bool,
    cold: bool,
    gpu_tokens_per_second: float,
    as_json: bool,
) -> None:
    """How fast this machine reads STORE in the order of training, and how many GPUs that feeds.

    Reads whole samples, pack after pack of a global shuffle, for some seconds or until each was read once: tokens,
    hidden states and, unless --no-teacher is given, what the store keeps of the target's prediction. It says how much
    of the store the page cache holds: what fits into memory is faster than a disk.
    """
    from cache_tools.reader import Store
    from cache_tools.reading_speed import measure, report_lines

    speed = measure(
        Store.open(store),
        seconds=seconds,
        num_threads=threads,
        token_budget=token_budget,
        with_teacher=not no_teacher,
        cold=cold,
        gpu_tokens_per_s=gpu_tokens_per_second,
    )
    click.echo(json.dumps(speed.to_dict(), indent=2) if as_json else "\n".join(report_lines(speed)))


def _marked(text: SampleText) -> str:
    """The heading and the text of a sample, for people."""
    heading = (
        f"sample {text.sample}, shard {text.shard}: {text.num_tokens} tokens, {text.num_supervised} supervised, "
        f"from {text.source}:{text.row + 1}"
    )
    if text.note:
        heading += f"; {text.note}"
    in_color = sys.stdout.isatty()
    pieces = [
        (click.style(segment, fg="green") if in_color else f"⟦{segment}⟧") if supervised else segment
        for supervised, segment in text.segments
    ]
    return heading + "\n" + "".join(pieces)
