"""Which samples a run trains on: validation, weights of sources, rejected samples."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_tools.errors import ConfigError
from cache_tools.packs import PackCursor
from cache_tools.reader import Store
from cache_tools.split import split_samples
from cache_tools.strategies import plan_for
from cache_tools.synthetic import make_store
from train.config import TrainConfig
from train.loader import pack_plan
from train.loop import train
from train.metrics import read_metrics
from train.selection import supervised_tokens, training_samples
from train.state import prepare
from train.summary import summarize

LENGTHS = [9, 14, 6, 21, 11, 8, 17, 30, 12, 25] * 4


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selection") / "s.zarr"
    make_store(path, LENGTHS)
    return path


def settings(store: Path, out: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "store": store, "out": out, "block_size": 4, "mask_token_id": 5, "num_draft_layers": 1, "token_budget": 64,
        "packs_per_step": 2, "anchors_per_step": 24, "steps": 12, "precision": "fp32", "device": "cpu", "threads": 1,
    }  # fmt: skip
    return TrainConfig(**{**values, **changes})


def two_sources(path: Path) -> Store:
    """The store as if its samples with odd numbers came from another source."""
    store = Store.open(path)
    (first,) = store.manifest.data.sources
    sources = tuple(dataclasses.replace(first, name=name) for name in ("chats", "code"))
    store.manifest = dataclasses.replace(store.manifest, data=dataclasses.replace(store.manifest.data, sources=sources))
    store.samples.__dict__["source"] = np.arange(store.num_samples, dtype=np.int32) % 2
    return store


def chosen(store: Store, **changes: Any) -> list[int]:
    return [int(sample) for sample in training_samples(settings(store.path, Path("out"), **changes), store)]


def test_by_default_every_sample_but_the_rejected_comes_once(store_path: Path, tmp_path: Path) -> None:
    assert chosen(Store.open(store_path)) == list(range(40))
    store = make_store(tmp_path / "s.zarr", LENGTHS, rejected=[3, 17])
    assert chosen(store) == sorted(set(range(40)) - {3, 17})


def test_validation_samples_are_the_same_whatever_the_seed_and_never_trained_on(
    store_path: Path, tmp_path: Path
) -> None:
    store = Store.open(store_path)
    kept, held_out = split_samples(store.samples.content_id, validation_share=0.3, seed=0)
    assert 4 < len(held_out) < 20
    for seed in (0, 1):
        assert chosen(store, validation_share=0.3, seed=seed) == kept.tolist()
    state = prepare(settings(store_path, tmp_path / "run", validation_share=0.3), lambda _: None)
    with state.open_loader() as loader:
        batches = list(islice(loader, 40))
    assert batches[-1].epoch > 2
    assert {sample for batch in batches for sample in batch.samples.tolist()} == set(kept.tolist())


@pytest.mark.parametrize("chunk_rows", [1, 8])
def test_supervised_tokens_are_those_of_the_given_samples_only(tmp_path: Path, chunk_rows: int) -> None:
    """Samples of a shard touch each other, or have empty rows between them."""
    store = make_store(tmp_path / "s.zarr", LENGTHS, vocab_size=5000, chunk_rows=chunk_rows, shard_rows=120)
    assert store.num_shards > 3
    for samples in (np.arange(40), np.array([0]), np.array([3, 4, 11, 12, 30]), np.array([39]), np.arange(1, 40, 2)):
        expected: set[int] = set()
        for sample in samples.tolist():
            ids, mask = store.read_tokens(sample)
            expected |= set(ids[mask].tolist())
        assert supervised_tokens(store, samples, num_tokens=5000).tolist() == sorted(expected)


def test_a_split_that_leaves_nothing_is_refused(store_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"validation-share 0\.9999"):
        chosen(Store.open(store_path), validation_share=0.9999)


def test_weights_repeat_and_thin_out_sources(store_path: Path) -> None:
    store = two_sources(store_path)
    counts = Counter(chosen(store, source_weights=("chats=2", "code=1/4")))
    assert {counts[sample] for sample in range(0, 40, 2)} == {2}
    assert sorted(counts[sample] for sample in range(1, 40, 2)) == [0] * 15 + [1] * 5
    with pytest.raises(ConfigError, match="did you mean chats"):
        chosen(store, source_weights=("chat=2",))


def test_an_epoch_of_a_doubled_source_holds_it_twice_and_the_summary_counts_it(
    store_path: Path, tmp_path: Path
) -> None:
    config = settings(store_path, tmp_path / "run", steps=None, epochs=1.0, source_weights=("synthetic=2",))
    train(config, say=lambda _: None)
    summary = summarize(config.out)
    assert summary["source_tokens"] == {"synthetic": summary["tokens"]}
    assert 2 * sum(LENGTHS) <= summary["tokens"] <= 2 * sum(LENGTHS) + 2 * 64


@pytest.mark.parametrize("order", ["sorted-static", "sorted-chunks", "random-padded", "bucketed"])
def test_other_orders_train_on_their_own_packs_and_resume(store_path: Path, tmp_path: Path, order: str) -> None:
    store = Store.open(store_path)
    config = settings(store_path, tmp_path / "run", order=order, steps=20, checkpoint_every=7)
    plan = pack_plan(store, seed=0, token_budget=64, packs_per_step=2, order=order)
    expected = plan_for(order, store.samples.length, seed=0, token_budget=64, packs_per_step=2)
    for cursor in (PackCursor(), PackCursor(step=9, epoch=1, pack=3)):
        assert [pack.tolist() for pack in plan.step(cursor)[0]] == [pack.tolist() for pack in expected.step(cursor)[0]]
    train(config, say=lambda _: None)
    whole = [line["loss"] for line in read_metrics(config.out / "metrics.jsonl")]
    stopped = dataclasses.replace(config, out=tmp_path / "stopped", log_every=9)
    with pytest.raises(KeyboardInterrupt):
        train(stopped, say=_interrupt_at_a_console_line)
    train(stopped, say=lambda _: None)
    assert [line["loss"] for line in read_metrics(stopped.out / "metrics.jsonl")] == whole


def _interrupt_at_a_console_line(line: str) -> None:
    if line.startswith("["):
        raise KeyboardInterrupt
