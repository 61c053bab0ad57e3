"""The command `dflash-cache`: look into a store and check it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cache_tools.settings import CommandGroup

if TYPE_CHECKING:
    from cache_tools.inspection import SampleText

_store_argument = click.argument("store", type=click.Path(path_type=Path))
_json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dflash-offline")
def main() -> None:
    """Look into a store of hidden states, and check it."""


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
@_json_flag
def verify(store: Path, as_json: bool) -> None:
    """Check every file of STORE against its checksum; exit 1 if anything is wrong.

    Each finding names the file, and where known the shard and the samples that are damaged. A store that is being
    written at the moment has findings of the kinds "temporary" and "unsealed".
    """
    from cache_tools.integrity import num_bytes_to_verify, verify
    from cache_tools.progress import progress_bar

    with progress_bar(total=num_bytes_to_verify(store), unit="B", desc="verify") as progress:
        findings = verify(store, progress)
    if as_json:
        click.echo(json.dumps({"ok": not findings, "findings": [item.to_dict() for item in findings]}, indent=2))
    else:
        for finding in findings:
            click.echo(str(finding))
        click.echo(
            f"{len(findings)} findings" if findings else f"ok: every file matches its checksum{_unfinished(store)}"
        )
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


def _unfinished(path: Path) -> str:
    """What a sound store still lacks; empty for a complete one."""
    from cache_tools.reader import Store

    store = Store.open(path)
    return "" if store.complete else f", but only {len(store.sealed)} of {store.num_shards} shards are computed"


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
