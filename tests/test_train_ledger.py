"""The record of what steps trained on."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache_tools.synthetic import make_store
from train.ledger import extend_hash, tokens_by_source

Steps = list[list[int]]
STEPS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=6)


def chain(steps: Steps) -> int:
    value = 0
    for samples in steps:
        value = extend_hash(value, np.array(samples, dtype=np.int64))
    return value


@given(STEPS, st.randoms())
def test_the_hash_does_not_see_the_order_inside_a_step(steps: Steps, rng: random.Random) -> None:
    assert chain([rng.sample(step, len(step)) for step in steps]) == chain(steps)


@given(STEPS, STEPS)
def test_the_hash_tells_different_steps_apart(one: Steps, other: Steps) -> None:
    assert (chain(one) == chain(other)) == ([sorted(step) for step in one] == [sorted(step) for step in other])


def test_the_hash_is_the_same_for_ever() -> None:
    assert f"{chain([[3, 1, 2], [0]]):016x}" == "0efe0c9033f1498d"


def test_tokens_are_counted_by_name_of_the_source(tmp_path: Path) -> None:
    lengths = [9, 14, 6, 21, 11, 8]
    store = make_store(tmp_path / "s.zarr", lengths)
    sources = [2, 0, 1, 2, 2, 0]
    (first,) = store.manifest.data.sources
    names = [dataclasses.replace(first, name=name) for name in ("chats", "code", "chats")]
    store.manifest = dataclasses.replace(
        store.manifest, data=dataclasses.replace(store.manifest.data, sources=tuple(names))
    )
    store.samples.__dict__["source"] = np.array(sources, dtype=np.int32)
    chosen = np.array([0, 2, 3, 3, 5])
    expected = {"chats": 0, "code": 0}
    for sample in chosen.tolist():
        expected[("chats", "code", "chats")[sources[sample]]] += int(store.samples.length[sample])
    assert tokens_by_source(store, chosen) == expected
