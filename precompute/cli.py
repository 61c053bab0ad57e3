"""The command `dflash-precompute`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import click

from cache_tools.settings import CommandGroup, config_options
from precompute.config import CodecsConfig, PrecomputeConfig


@click.group(cls=CommandGroup)
def main() -> None:
    """Turns conversations into a store of a target's hidden states."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@config_options(PrecomputeConfig)
def plan(config: PrecomputeConfig, as_json: bool) -> None:
    """Tokenise the data, report sizes, and write the planned store if --store is given. Needs no weights.

    An existing store of the same plan stays as it is; one of another plan is refused, naming what differs.
    """
    from precompute.planning import plan as make_plan
    from precompute.reporting import plan_report
    from precompute.run import check_plan, write_plan

    planned_before = config.store is not None and config.store.exists()
    if config.store is not None and planned_before:
        config = replace(config, chunk_rows=check_plan(config, config.store).layout.chunk_rows)
    planned = make_plan(config)
    report = plan_report(planned, config.store)
    click.echo(json.dumps(report, indent=2) if as_json else _plan_text(report))
    if config.store is not None and not planned_before:
        write_plan(planned, config.store)
    elif planned_before and not as_json:
        click.echo(f"store        {config.store} has this plan already")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@config_options(PrecomputeConfig)
def run(config: PrecomputeConfig, as_json: bool) -> None:
    """Compute the hidden states. Plans the store first if it does not exist; goes on where a killed run stopped."""
    from precompute.run import run as run_all

    summary = asdict(run_all(config))
    click.echo(json.dumps(summary, indent=2) if as_json else _run_text(summary))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@config_options(PrecomputeConfig)
def repair(config: PrecomputeConfig, as_json: bool) -> None:
    """Check the store and make again what is damaged, byte for byte; takes the settings of its `run`.

    Then goes on like `run`, if anything else is not computed yet. A repair that was interrupted is run again.
    """
    from precompute.repair import repair as repair_store

    summary = asdict(repair_store(config))
    click.echo(json.dumps(summary, indent=2) if as_json else _repair_text(summary))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
@config_options(CodecsConfig)
def codecs(config: CodecsConfig, as_json: bool) -> None:
    """Run the target on a few samples and show what each codec would cost and lose. Writes nothing."""
    from cache_tools.codec_report import table_lines
    from precompute.codecs import compare_codecs

    report = compare_codecs(config)
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else "\n".join(table_lines(report)))


def _plan_text(report: dict[str, Any]) -> str:
    from precompute.reporting import EXPECTED_RATIO, readable_bytes

    size = report["bytes"]
    lines = [
        f"target       {report['target']}, layers {', '.join(map(str, report['layer_ids']))}",
        f"samples      {report['samples']:,} in {report['shards']:,} shards"
        + (f", {report['duplicates']:,} of them duplicates (kept)" if report["duplicates"] else ""),
        f"tokens       {report['tokens']:,}, {report['supervised_share']:.1%} supervised",
        "lengths      " + "  ".join(f"{name} {value:,}" for name, value in report["lengths"].items()),
        f"bytes/token  {report['bytes_per_token']['uncompressed']:,.0f} uncompressed, "
        f"{report['bytes_per_token']['expected']:,.0f} expected, "
        + (
            "padding is compressed away"
            if report["codec"] == "bf16"
            else f"{report['padding_share']:.1%} padding included"
        )
        + f" (chunks of {report['chunk_rows']} rows)",
        f"hidden       {readable_bytes(size['uncompressed'])} uncompressed, "
        f"{readable_bytes(size['expected'])} expected"
        + (f" (estimate: 1/{EXPECTED_RATIO})" if report["codec"] == "bf16" else ""),
    ]
    if size["teacher"]:
        lines.append(
            f"teacher      {readable_bytes(size['teacher'])}, {report['bytes_per_token']['teacher']:,.0f} per token"
        )
    lines.append(f"store        at most {readable_bytes(report['largest_bytes'])} in all")
    if "free_bytes" in report:
        lines.append(
            f"disk         {readable_bytes(report['free_bytes'])} free, {readable_bytes(size['needed'])} needed"
        )
    lines += [f"source       {s['name']}: {s['samples']:,} of {s['rows']:,} rows" for s in report["sources"]]
    for reason, count in report["skipped"].items():
        lines.append(f"skipped      {count:,} x {reason}")
        lines += [f"               {example}" for example in report["skipped_examples"].get(reason, [])]
    return "\n".join(lines)


def _run_text(summary: dict[str, Any]) -> str:
    from precompute.reporting import readable_bytes

    lines = [
        f"store        {summary['store']} ({'complete' if summary['complete'] else 'not complete'})",
        f"tokens       {summary['tokens']:,} in {summary['samples']:,} samples"
        + (f", {summary['rejected']:,} samples rejected" if summary["rejected"] else ""),
        f"computed     {summary['computed_tokens']:,} tokens in {summary['seconds']:,.1f} s: "
        f"{summary['ktok_per_second']:.2f} Ktok/s, {summary['write_wait_share']:.0%} waiting for writes",
        f"size         {readable_bytes(summary['hidden_bytes'])}, {summary['bytes_per_token']:,.0f} bytes/token, "
        f"{summary['ratio']:.2f}x smaller than uncompressed",
    ]
    return "\n".join(lines)


def _repair_text(summary: dict[str, Any]) -> str:
    lines = [f"damaged      {name}" for name in summary["damaged"]] or ["damaged      nothing"]
    lines += [f"foreign      {name}: left alone, `verify` goes on to report it" for name in summary["foreign"]]
    if summary["restored"]:
        lines.append(f"planned      {len(summary['restored'])} files again")
    if summary["target"]:
        lines.append("target       weights stored again")
    if summary["shards"]:
        lines.append(f"shards       {', '.join(map(str, summary['shards']))} computed again")
    if summary["differing"]:
        shards = ", ".join(map(str, summary["differing"]))
        lines.append(f"note         shards {shards} are sound, but not bit for bit what they were")
    return "\n".join([*lines, _run_text(summary["run"])])
