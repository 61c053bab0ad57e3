"""Stores to be damaged and repaired, and the ways to damage them."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from precompute_cases import SMALL_SHARD_BYTES

from cache_tools.reader import Store
from precompute.config import PrecomputeConfig


@dataclasses.dataclass(frozen=True)
class Case:
    """A complete store, never to be changed, and what made it."""

    config: PrecomputeConfig
    content: dict[str, bytes]

    @property
    def store(self) -> Path:
        assert self.config.store is not None
        return self.config.store

    def copy(self, folder: Path) -> PrecomputeConfig:
        """The settings of a copy of the store."""
        return dataclasses.replace(self.config, store=Path(shutil.copytree(self.store, folder / "store")))


class RejectsSome:
    """Calls the samples unusable whose states have as many rows as the first that it sees."""

    def __init__(self) -> None:
        self.rows: int | None = None

    def __call__(self, hidden: Any) -> str | None:
        self.rows = self.rows or len(hidden)
        return "all zero" if len(hidden) == self.rows else None


def set_conditions(patch: pytest.MonkeyPatch, case: Case) -> None:
    """Shards as small and samples as unusable as when the store was made."""
    patch.setattr("precompute.planning._MB", SMALL_SHARD_BYTES)
    rejects = RejectsSome()
    rejects.rows = int(Store.open(case.store).samples.length[0])
    patch.setattr("precompute.sink.find_bad_layer", rejects)


def damage(file: Path, how: str, chance: random.Random) -> None:
    """Flips a bit of a file, cuts it, deletes it, or writes something else in its place."""
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
    elif how == "cut":
        file.write_bytes(content[: chance.randrange(len(content))])
    elif how == "delete":
        file.unlink()
    else:
        file.write_bytes(b'{"nonsense": 1}')
