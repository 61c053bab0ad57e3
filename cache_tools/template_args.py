"""Variables for a chat template, as NAME=JSON: data must be rendered with the same ones wherever it is used."""

from __future__ import annotations

import json
from typing import Any

from cache_tools.errors import ConfigError


def parse_template_args(pairs: tuple[str, ...]) -> dict[str, Any]:
    """`("enable_thinking=false",)` -> `{"enable_thinking": False}`. Raises ConfigError naming the bad pair."""
    parsed: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        try:
            if not equals or not name.isidentifier():
                raise ValueError(pair)
            parsed[name] = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                "a template argument is not NAME=JSON",
                got=repr(pair),
                expected='for example enable_thinking=false or date="1 May 2026"',
            ) from error
    return parsed
