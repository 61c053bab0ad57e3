"""Writes docs/settings.md from the configuration dataclasses: `python docs/generate.py`. A test keeps it current."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cache_tools.settings import field_docs, flag_name, is_required, shown_default
from precompute.config import CodecsConfig, PrecomputeConfig
from train.config import EvalConfig, TrainConfig

SETTINGS = Path(__file__).resolve().parent / "settings.md"
HEAD = """# Settings

Every setting is a flag, and a key of the YAML file given with `--config` (`batch_tokens` or `batch-tokens`). A flag
wins over the file, the file over the default. An unknown key is an error. This page is made by `docs/generate.py`.
"""
COMMANDS = (
    ("dflash-precompute plan | run | repair", PrecomputeConfig),
    ("dflash-precompute codecs", CodecsConfig),
    ("dflash-train run", TrainConfig),
    ("dflash-train eval", EvalConfig),
)


def settings_page() -> str:
    """The page as Markdown: one table per command."""
    parts = [HEAD]
    for command, config_class in COMMANDS:
        parts += [f"\n## `{command}`\n", "\n| flag | default | meaning |\n|---|---|---|\n"]
        docs = field_docs(config_class)
        for field in dataclasses.fields(config_class):
            default = "required" if is_required(field) else shown_default(field)
            meaning = docs[field.name].replace("|", "\\|")
            parts.append(f"| `{flag_name(field.name)}` | {default} | {meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    SETTINGS.write_text(settings_page(), encoding="utf-8")
