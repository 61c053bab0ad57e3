"""Flags, YAML keys and defaults come from one dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import pytest
from click.testing import CliRunner

from cache_tools.errors import ConfigError, StoreError
from cache_tools.settings import CommandGroup, config_options, field_docs, load_config, to_plain


@dataclass(frozen=True, kw_only=True)
class Example:
    store: Path
    """Where the store is."""
    codec: Literal["bf16", "raw"] = "bf16"
    """How bytes are packed."""
    seed: int = 7
    """Seed of everything."""
    rate: float = 0.5
    """A rate
    over two lines."""
    layers: tuple[int, ...] | None = None
    """Layer ids."""
    data: tuple[Path, ...] = ()
    """Files."""
    fast: bool = False
    """Be fast."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError("seed is negative", got=self.seed, expected=">= 0")


@click.group(cls=CommandGroup)
def main() -> None:
    """Example."""


@main.command()
@config_options(Example)
@click.option("--json", "as_json", is_flag=True)
def run(config: Example, as_json: bool) -> None:
    """Runs."""
    click.echo(repr((config, as_json)))


@main.command()
def interrupted() -> None:
    raise KeyboardInterrupt


@main.command()
def too_long() -> None:
    Path("x" * 300).stat()


@main.command()
def odd_text() -> None:
    click.echo("\ud800")


@main.command()
def fail() -> None:
    raise StoreError("no store", where="x.zarr", fix="make one")


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_flag_wins_over_yaml_which_wins_over_default(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("store: a\nseed: 1\nrate: 1e-3\nlayers: [1, 2]\nfast: yes\ndata: [d, 'e,f']\n")
    code, output = invoke("run", "--config", str(path), "--seed", "2", "--no-fast", "--json")
    expected = Example(store=Path("a"), seed=2, rate=1e-3, layers=(1, 2), data=(Path("d"), Path("e,f")), fast=False)
    assert (code, output.strip()) == (0, repr((expected, True)))


def test_repeated_flags_and_commas_are_the_same() -> None:
    one = invoke("run", "--store", "s", "--layers", "1,2", "--layers", "3")
    two = invoke("run", "--store", "s", "--layers", "1,2,3")
    assert one == two
    assert "layers=(1, 2, 3)" in one[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sead: 1", ["unknown setting 'sead'", "'seed'"]),
        ("seed: [1]", ["'seed'", "int"]),
        ("seed: 1.5", ["'seed'", "1.5"]),
        ("fast: 3", ["'fast'", "bool"]),
        ("codec: zip", ["'codec'", "bf16 | raw"]),
        ("seed: null", ["'seed'", "None"]),
        ("seed: 1\n--seed: 2", ["unknown setting"]),
        ("- 1", ["mapping"]),
        ("a: [", ["YAML"]),
        ("layers: [x]", ["'layers'", "list of int"]),
        ("seed: -1", ["seed is negative"]),
        ("rate: .nan", ["'rate'", "nan"]),
    ],
)
def test_wrong_yaml_is_a_message_with_exit_2_and_no_traceback(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    code, output = invoke("run", "--store", "s", "--config", str(path))
    assert code == 2
    assert all(word in output for word in words), output
    assert "Traceback" not in output


def test_missing_value_names_the_flag() -> None:
    code, output = invoke("run")
    assert code == 2
    assert "--store" in output


def test_errors_of_the_work_exit_1_with_every_part() -> None:
    code, output = invoke("fail")
    assert code == 1
    assert all(part in output for part in ("error: no store", "where: x.zarr", "to fix: make one"))


def test_help_shows_the_docstring_and_default_of_every_field() -> None:
    _, output = invoke("run", "--help")
    flat = " ".join(output.split())
    for doc in field_docs(Example).values():
        assert doc in flat
    assert "A rate over two lines. [default: 0.5]" in flat


def test_plain_form_round_trips_through_yaml(tmp_path: Path) -> None:
    import yaml

    config = Example(store=Path("s"), layers=(3,), data=(Path("d"),))
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(to_plain(config)))
    assert load_config(Example, path, {}) == config


def test_what_the_system_refuses_and_interrupts_are_no_tracebacks() -> None:
    code, output = invoke("too-long")
    assert (code, "File name too long" in output) == (1, True)
    assert invoke("interrupted") == (130, "interrupted\n")
    assert invoke("odd-text") == (0, "\\ud800\n")
