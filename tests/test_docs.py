"""Documentation says what the code does."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import click
import pytest

from cache_tools.settings import field_docs, flag_name, load_config
from precompute.cli import main as precompute
from precompute.config import PrecomputeConfig
from train.cli import main as train
from train.config import EvalConfig, TrainConfig

ROOT = Path(__file__).resolve().parent.parent
COMMANDS: list[tuple[click.Command, str, type[Any]]] = [
    (precompute, "plan", PrecomputeConfig),
    (precompute, "run", PrecomputeConfig),
    (precompute, "repair", PrecomputeConfig),
    (train, "run", TrainConfig),
    (train, "eval", EvalConfig),
]


@pytest.mark.parametrize(("group", "name", "config_class"), COMMANDS, ids=lambda x: getattr(x, "name", str(x)))
def test_flags_fields_and_docstrings_are_equal(group: click.Group, name: str, config_class: type[Any]) -> None:
    command = group.commands[name]
    flags = {option for parameter in command.params for option in parameter.opts}
    fields = {field.name for field in dataclasses.fields(config_class)}
    assert flags - {"--config", "--json"} == {flag_name(field) for field in fields}
    assert set(field_docs(config_class)) == fields


def test_settings_page_is_what_the_generator_writes() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == generate.settings_page(), "run `python docs/generate.py`"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*/**/*.yaml")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_example_configurations_are_valid(path: Path) -> None:
    given: dict[str, Any] = {"store": Path("s")}
    config_class: type[Any]
    if path.name == "train.yaml":
        config_class = TrainConfig
        given |= {"out": Path("o")}
    else:
        assert path.name == "precompute.yaml"
        config_class = PrecomputeConfig
        given |= {"target": Path("t"), "data": (Path("d"),)}
    load_config(config_class, path, given)


def test_links_in_documents_lead_somewhere() -> None:
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *(ROOT / "examples").glob("*/*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
