"""A look at the held-out samples every so many steps: loss, acceptance length, and the best checkpoint so far.

Nothing here touches what training computes: no random stream, no gradient, no state but the best checkpoint. Of a run
that averages its weights, the average is judged.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from cache_tools.errors import ConfigError
from train import checkpoint as checkpoints
from train.acceptance import Acceptance, acceptance_report, shown_length
from train.batches import Pack
from train.held_out import group_samples, read_packs
from train.held_out_loss import held_out_sums
from train.objective import BlockSums, OutputHead
from train.selection import some_of, validation_samples
from train.state import TrainingState
from train.target_parts import TargetParts
from train.walk import walk_answers


class Validation:
    """Judges the drafter of a run when its settings say so; every rank takes part."""

    def __init__(self, state: TrainingState, say: Callable[[str], None]) -> None:
        """Raises ConfigError when validation is on and no sample is held out."""
        self._state, self._say = state, say
        self._every = state.config.steps_between_validations
        self._best = 0.0
        if not self._every:
            return
        config, store = state.config, state.store
        samples = validation_samples(store, config.validation_share)
        if not len(samples):
            raise ConfigError(
                "no sample is held out to validate with",
                where=store.path,
                got=f"--validation-share {config.validation_share} of {store.num_samples} samples",
                fix="give a larger share, or --validate-every 0",
            )
        chosen = some_of(samples, config.validation_samples)
        supervised = int(store.samples.supervised[chosen].sum())
        self._groups = group_samples(store, chosen)
        self._anchor_rate = min(1.0, config.anchors_per_step / supervised)
        self._head = OutputHead(_whole_head(state))
        best = checkpoints.best(config.out) if state.saved_step is not None else None  # else of an earlier run
        if best is not None:
            self._best = checkpoints.acceptance_length_of(checkpoints.read_plain(best))

    def if_due(self) -> dict[str, Any] | None:
        """Metrics for metrics.jsonl after a step that validation is due for, the same on every rank; else None."""
        state = self._state
        if not self._every or (state.step % self._every and state.step != state.total_steps):
            return None
        began = time.monotonic()
        with state.average.applied() if state.average is not None else nullcontext():
            metrics = self._measure()
        better = (metrics["acceptance_length"] or 0.0) > self._best
        if better:
            self._best = metrics["acceptance_length"]
            if state.ranks.is_first:
                snapshot = dataclasses.replace(state.snapshot(), validation=metrics)
                checkpoints.save_best(state.config.out, snapshot)
        self._say(
            f"validation at step {state.step}: loss={metrics['loss']:.4f} acc={metrics['acc']:.4f} "
            f"streak={metrics['streak']:.3f} acceptance_length={shown_length(metrics['acceptance_length'])}"
            f"{' (best so far)' if better else ''}, {metrics['num_samples']} samples, {time.monotonic() - began:.1f} s"
        )
        return metrics

    @torch.no_grad()
    def _measure(self) -> dict[str, Any]:
        state, ranks = self._state, self._state.ranks
        own = range(ranks.rank, len(self._groups), ranks.world_size)
        packs = read_packs(
            state.store,
            [self._groups[index] for index in own],
            state.layer_ids,
            skip_unreadable=state.config.max_unreadable > 0,
        )
        found = {index: self._judge(pack) for index, pack in zip(own, packs, strict=True)}
        # Added up in the order of packs, so that the sums do not depend on the number of ranks.
        results = [result for _, result in sorted(item for part in ranks.gather(found) for item in part.items())]
        sums = BlockSums.zero(state.config.block_size)
        for result in results:
            sums += BlockSums.from_vector(result.sums)
        answers = [answer for result in results for answer in result.answers]
        report = acceptance_report(answers, state.config.block_size)
        return {
            "loss": sums.mean_loss,
            "acc": sums.accuracy,
            "streak": sums.streak,
            "acceptance_length": report["acceptance_length"],
            "acceptance_length_pooled": report["acceptance_length_pooled"],
            "num_samples": sum(result.num_samples for result in results),
            "num_answers": len(answers),
        }

    def _judge(self, pack: Pack) -> _Judged:
        state = self._state
        if not pack.samples:
            return _Judged(BlockSums.zero(state.config.block_size).vector(), [], 0)
        features = pack.tapped.to_features(state.device, state.compute_dtype, state.feature_scale)
        with torch.autocast(state.device.type, torch.bfloat16, enabled=state.config.precision == "bf16"):
            sums = held_out_sums(
                state.drafter,
                features,
                pack,
                embed=state.embed,
                head=self._head,
                anchors_per_supervised=self._anchor_rate,
                gamma=state.config.slot_gamma,
            )
            answers = walk_answers(
                state.drafter, features, pack, embed=state.embed, lm_head=self._head.weight, max_new_tokens=None
            )
        return _Judged(sums.vector().cpu(), answers, len(pack.samples))


@dataclasses.dataclass(frozen=True)
class _Judged:
    """What one pack gives."""

    sums: Tensor
    """`BlockSums.vector`, on the CPU."""
    answers: list[Acceptance]
    num_samples: int


def _whole_head(state: TrainingState) -> Tensor:
    """The target's output head [V, H] over the whole vocabulary: decoding knows no restricted one."""
    if state.head.index_of is None:
        return state.head.weight
    if state.store.target_attributes.tied:
        return state.embedding
    return TargetParts.from_store(state.store, device=state.device, dtype=state.compute_dtype).lm_head
