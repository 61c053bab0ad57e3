"""Settings are checked when they are made, and every one of them is explained."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cache_tools.errors import ConfigError
from cache_tools.settings import field_docs, load_config
from cache_tools.template_args import parse_template_args
from precompute.config import PrecomputeConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": ()},
        {"max_length": 0},
        {"batch_tokens": -1},
        {"limit": 0},
        {"workers": 0},
        {"min_supervised": 5000},
        {"attention": "flash_attention_2", "dtype": "float32"},
        {"template_args": ("enable_thinking",)},
        {"template_args": ("enable_thinking=no",)},
        {"template_args": ("two words=1",)},
        {"max_bytes": "many"},
    ],
)
def test_a_setting_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PrecomputeConfig(**{"target": Path("t"), "data": (Path("d"),), **wrong})


def test_template_arguments_are_json_values() -> None:
    assert parse_template_args(("a=false", 'b="x=y"', "c=[1]")) == {"a": False, "b": "x=y", "c": [1]}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (('date="1 May, 2026"', "a=1"), {"date": "1 May, 2026", "a": 1}),
        (('a=[1, 2],b={"c": 3, "d": "]"}',), {"a": [1, 2], "b": {"c": 3, "d": "]"}}),
        ((r'quote="a \", b",c=true',), {"quote": 'a ", b', "c": True}),
    ],
)
def test_commas_inside_a_template_argument_belong_to_its_value(
    flags: tuple[str, ...], expected: dict[str, Any]
) -> None:
    given = {"target": Path("t"), "data": (Path("d"),), "template_args": flags}
    config = load_config(PrecomputeConfig, None, given)
    assert parse_template_args(config.template_args) == expected


def test_the_order_of_template_arguments_does_not_make_another_store() -> None:
    first, second = (
        PrecomputeConfig(target=Path("t"), data=(Path("d"),), template_args=arguments)
        for arguments in (("a=1", "b=2"), ("b=2", "a= 1"))
    )
    assert first.plan_settings() == second.plan_settings()


def test_every_setting_has_a_docstring() -> None:
    assert set(field_docs(PrecomputeConfig)) == {field.name for field in fields(PrecomputeConfig)}
