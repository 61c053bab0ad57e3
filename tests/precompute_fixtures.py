"""Fixtures of the tests of precompute: one target and one set of conversations, never to be changed; small shards."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with random weights."""
    from precompute_cases import make_target  # here: other tests shall not wait for transformers

    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty conversations of different lengths."""
    from precompute_cases import chats, write_jsonl

    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", chats(30))


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversations of a test fill several shards."""
    from precompute_cases import SMALL_SHARD_BYTES

    monkeypatch.setattr("precompute.planning._MB", SMALL_SHARD_BYTES)
