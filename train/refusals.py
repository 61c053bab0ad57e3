"""What a run must not be continued or shared with: other settings, another store, ranks that do not agree."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from cache_tools.errors import CheckpointError, DflashError
from cache_tools.settings import flag_name
from train.checkpoint import Checkpoint
from train.config import RESUMABLE_CHANGES, TrainConfig
from train.drafter_config import DrafterConfig
from train.ranks import Ranks


def refuse_changes(previous: Checkpoint, now: dict[str, Any]) -> None:
    """Raises CheckpointError when a run is resumed with settings that change what it computes."""
    before = json.loads(json.dumps(previous.config))
    current = json.loads(json.dumps(now))
    changed = [
        f"{'what the store holds' if name == 'store_fingerprint' else flag_name(name)}: "
        f"{before.get(name)!r} -> {value!r}"
        for name, value in current.items()
        if name not in RESUMABLE_CHANGES and before.get(name) != value
    ]
    if changed:
        raise CheckpointError(
            "this run began with other settings",
            where=now["out"],
            got="; ".join(changed),
            expected="the settings in its config.yaml",
            fix="use the old settings, or another --out for a new run",
        )


def refuse_different_ranks(ranks: Ranks, plain: dict[str, Any]) -> None:
    """Machines may differ in flags or in the store that they see under one path; nothing later would tell."""
    for rank, theirs in enumerate(ranks.gather(plain)):
        differing = [name for name in plain if name not in RESUMABLE_CHANGES and plain[name] != theirs[name]]
        if differing:
            raise DflashError(
                f"rank {rank} and rank {ranks.rank} would not train the same run",
                got="; ".join(f"{name}: {theirs[name]!r} and {plain[name]!r}" for name in differing),
                fix="start every rank with the same flags and the same store",
            )


def refuse_other_shape(previous: Checkpoint, now: DrafterConfig, config: TrainConfig) -> None:
    """Settings may be equal and the drafter still another one: many of them come from the store."""
    current = json.loads(json.dumps(dataclasses.asdict(now)))
    before = json.loads(json.dumps(previous.drafter))
    changed = [f"{name}: {before.get(name)} -> {value}" for name, value in current.items() if before.get(name) != value]
    if changed:
        raise CheckpointError(
            "this run began with another store: its drafter differs from the one that this store asks for",
            where=config.out,
            got="; ".join(changed),
            fix="give the old store, or another --out for a new run",
        )
