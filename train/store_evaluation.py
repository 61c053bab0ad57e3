"""Acceptance from a store alone: its answers are walked block by block, and no target is run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.errors import CheckpointError, ConfigError, StoreError
from cache_tools.progress import Progress
from cache_tools.reader import Store
from train import checkpoint as checkpoints
from train.acceptance import Acceptance, acceptance_lines, acceptance_report, answer_rows
from train.batches import Pack
from train.config import EvalConfig, default_gamma
from train.devices import pick_device
from train.drafter import DFlashDrafter
from train.held_out import group_samples, read_packs
from train.held_out_loss import held_out_sums
from train.loading import checkpoint_of, is_exported, load_any_drafter
from train.objective import BlockSums, OutputHead
from train.selection import some_of, validation_samples
from train.state import store_fingerprint
from train.target_parts import TargetParts
from train.walk import samples_of_answers, walk_answers

_ANCHORS_PER_SUPERVISED = 0.25
EXACT_IF = "exact for answers that the target generated greedily, else an estimate"


def evaluate_store(config: EvalConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Walks every answer of the chosen samples; returns a report for JSON.

    Beside what `acceptance_report` gives, it holds the `loss` in nats (cross entropy over blocks at a quarter of the
    supervised tokens, slots weighing as in training by default), which samples these are (`selection`), whether the
    drafter was trained on them (`held_out`, None when that is unknown), how much was walked, how fast, and the
    `answers` one by one.

    Raises ConfigError, StoreError or CheckpointError for what cannot be loaded or does not fit.
    """
    assert config.store is not None
    device = pick_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    store = Store.open(config.store)
    store.require_complete()
    drafter = load_any_drafter(config.drafter, config.checkpoint).to(device, dtype).eval()
    _check_fit(drafter, store, config.drafter)
    chosen = _choose(config, store)
    parts = TargetParts.from_store(store, device=device, dtype=dtype)

    # The scale of training lies in the drafter's `fc`.
    unscaled = torch.ones(len(drafter.config.target_layer_ids) * store.hidden_size, device=device)
    answers: list[Acceptance] = []
    answered: list[int] = []
    sums, head = BlockSums.zero(drafter.config.block_size, device), OutputHead(parts.lm_head)
    began = time.perf_counter()
    for pack in read_packs(store, group_samples(store, chosen.samples), drafter.config.target_layer_ids):
        features = pack.tapped.to_features(device, dtype, unscaled)
        sums += _loss(drafter, features, pack, parts, head)
        answers += walk_answers(
            drafter,
            features,
            pack,
            embed=lambda tokens: parts.embedding[tokens],
            lm_head=parts.lm_head,
            max_new_tokens=config.max_new_tokens,
        )
        answered += samples_of_answers(pack)
        if progress is not None:
            progress.update(len(pack.input_ids))
    seconds = time.perf_counter() - began
    tokens = sum(sum(answer.acceptance_lengths) for answer in answers)
    return {
        "store": str(config.store),
        "selection": chosen.description,
        "held_out": chosen.held_out,
        "num_samples": len(chosen.samples),
        "num_answers": len(answers),
        "num_tokens": tokens,
        "num_steps": sum(len(answer.acceptance_lengths) for answer in answers),
        "loss": sums.mean_loss,
        "dtype": config.dtype,
        "block_size": drafter.config.block_size,
        **acceptance_report(answers, drafter.config.block_size),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "validity": EXACT_IF,
        "answers": [{"sample": sample, **row} for sample, row in zip(answered, answer_rows(answers), strict=True)],
    }


@torch.no_grad()
def _loss(drafter: DFlashDrafter, features: Tensor, pack: Pack, parts: TargetParts, head: OutputHead) -> BlockSums:
    return held_out_sums(
        drafter,
        features,
        pack,
        embed=lambda tokens: parts.embedding[tokens],
        head=head,
        anchors_per_supervised=_ANCHORS_PER_SUPERVISED,
        gamma=default_gamma(drafter.config.block_size),
    )


def describe_store(report: Mapping[str, Any]) -> str:
    """The report as lines for a person."""
    known = {True: "not trained on", False: "TRAINED ON: not a fair measure", None: "unknown whether trained on"}
    return "\n".join(
        [
            f"samples            {report['num_samples']:,} ({report['selection']}; {known[report['held_out']]})",
            f"answers            {report['num_answers']:,} ({report['num_tokens']:,} tokens, {report['dtype']})",
            *acceptance_lines(report),
            f"loss               {report['loss']:.4f} nats",
            f"from the store     {report['validity']}",
            f"walked             {report['tokens_per_second']:,.0f} tok/s, {report['seconds']:.1f} s",
        ]
    )


@dataclass(frozen=True)
class _Chosen:
    samples: NDArray[np.int64]
    held_out: bool | None
    description: str


def _choose(config: EvalConfig, store: Store) -> _Chosen:
    """The samples to walk: those given, else those that the run held out, else all that have hidden states."""
    every = store.without_rejected()
    trained_here, apart = False, np.empty(0, dtype=np.int64)
    if not is_exported(config.drafter):
        settings = checkpoints.read_plain(checkpoint_of(config.drafter, config.checkpoint))["config"]
        trained_here = settings["store_fingerprint"] == store_fingerprint(store)
        if trained_here:
            apart = validation_samples(store, settings["validation_share"])
    if config.samples:
        samples, description = np.unique(np.asarray(config.samples, dtype=np.int64)), "given samples"
        missing = samples[~np.isin(samples, every)]
        if len(missing):
            raise ConfigError(
                "the store has no hidden states of some samples",
                where=store.path,
                got=f"--samples {missing.tolist()}",
                expected=f"0 to {store.num_samples - 1}, without rejected ones",
            )
    elif len(apart):
        samples, description = apart, "held out by the run"
    else:
        samples, description = every, "all of the store"
    samples = some_of(samples, config.max_samples)
    if not len(samples):
        raise StoreError("no sample is left to evaluate", where=store.path, got=f"{len(store.rejected)} rejected")
    return _Chosen(samples, bool(np.isin(samples, apart).all()) if trained_here else None, description)


def _check_fit(drafter: DFlashDrafter, store: Store, path: Path) -> None:
    mine, target = drafter.config, store.manifest.target
    pairs = {
        "hidden_size": (mine.hidden_size, target.hidden_size),
        "vocab_size": (mine.vocab_size, target.vocab_size),
        "num_target_layers": (mine.num_target_layers, target.num_layers),
    }
    differing = [f"{name} {one} against {other}" for name, (one, other) in pairs.items() if one != other]
    if differing:
        raise CheckpointError(
            "the drafter was made for another target than the store",
            where=path,
            got="; ".join(differing),
            expected=f"a drafter of {target.name}",
        )
    if not set(mine.target_layer_ids) <= set(store.layer_ids):
        raise StoreError(
            "the store lacks layers that the drafter taps",
            where=store.path,
            got=f"layers {list(store.layer_ids)}",
            expected=f"layers {list(mine.target_layer_ids)}",
            fix="precompute a store with these layers",
        )
