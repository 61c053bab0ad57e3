"""The `dflash-train` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from cache_tools.settings import CommandGroup, config_options
from train.config import EvalConfig, TrainConfig

if TYPE_CHECKING:
    from train.export import Format


@click.group(cls=CommandGroup, context_settings={"max_content_width": 120})
def main() -> None:
    """Train a DFlash drafter from a hidden-state store, evaluate it against its target, export it."""


@main.command()
@config_options(TrainConfig)
def run(config: TrainConfig) -> None:
    """Train a drafter. Run the same command again to resume after an interruption."""
    from train.loop import train
    from train.ranks import OtherRankFailed, is_first_process
    from train.summary import summarize

    try:
        train(config, say=click.echo)
    except OtherRankFailed as error:  # that rank prints why
        raise click.exceptions.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        if is_first_process():
            click.echo("interrupted; run the same command again to resume from the newest checkpoint", err=True)
        raise click.exceptions.Exit(130) from None
    if not is_first_process():
        return
    summary = summarize(config.out)
    if summary["steps"]:
        click.echo(
            f"done: {summary['steps']} steps, loss {summary['first_loss']:.3f} -> {summary['last_loss']:.3f}, "
            f"{summary['tokens_per_second'] / 1000:.2f} Ktok/s; {config.out}"
        )
    else:
        click.echo(f"done: untrained drafter; {config.out}")


@main.command("eval")
@config_options(EvalConfig)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, with every answer by itself.")
def evaluate_command(config: EvalConfig, as_json: bool) -> None:
    """Acceptance length, by speculative decoding with the target or from a store.

    With the target it also measures speed and proves that greedy output is equal.

    A store needs no target: a drafted token counts as accepted when it is the stored one. That is exact for answers
    that the target generated greedily, and an estimate for others.
    """
    from cache_tools.progress import progress_bar

    with progress_bar(total=None, unit="tok", desc="evaluate") as progress:
        if config.store is not None:
            from train.store_evaluation import describe_store, evaluate_store

            report = evaluate_store(config, progress)
            text = describe_store(report)
        else:
            from train.evaluate import describe, evaluate

            report = evaluate(config, progress)
            text = describe(report)
    click.echo(json.dumps(report, indent=1) if as_json else text)
    if config.dtype == "float32" and report.get("identical") not in (None, report.get("num_prompts")):
        raise click.exceptions.Exit(1)


@main.command()
@click.option(
    "--run",
    "source",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a training run, or of an exported drafter.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for the exported drafter.")
@click.option(
    "--format",
    type=click.Choice(["z-lab", "speculators", "transformers"]),
    default="z-lab",
    show_default=True,
    help="z-lab: for SGLang and vLLM, and for eval. speculators: for vLLM. transformers: for its own generate().",
)
@click.option(
    "--target",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the target, compared with the drafter; speculators takes name, embedding and output head from it.",
)
@click.option(
    "--checkpoint",
    type=click.Choice(["last", "best"]),
    default="last",
    show_default=True,
    help="Of a training run: the newest one, or the one with the highest acceptance length in validation.",
)
def export(source: Path, out: Path, format: Format, target: Path | None, checkpoint: Literal["last", "best"]) -> None:
    """Write the drafter in a format that vLLM, SGLang or transformers read."""
    from train.export import export_drafter
    from train.loading import load_any_drafter
    from train.target_folder import TargetFolder

    drafter = load_any_drafter(source, checkpoint)
    opened = TargetFolder.open(target) if target is not None else None
    number = export_drafter(drafter, out, format=format, target=opened)
    click.echo(f"exported {number} tensors to {out}")


@main.command("import")
@click.option(
    "--from",
    "source",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Checkpoint in the z-lab or the speculators format; which of them is found out.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for the drafter.")
@click.option(
    "--target",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the target, compared with the drafter; needed where that does not say how many layers it has.",
)
def import_command(source: Path, out: Path, target: Path | None) -> None:
    """Check a published drafter and write it as `export` does, for eval, export and run --init-drafter."""
    from train.export import export_drafter, load_drafter
    from train.target_folder import TargetFolder

    opened = TargetFolder.open(target) if target is not None else None
    drafter = load_drafter(source, num_target_layers=opened.num_layers if opened is not None else None)
    number = export_drafter(drafter, out, target=opened)
    click.echo(f"imported {number} tensors to {out}")
