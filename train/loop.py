"""Training: store -> packs -> drafter -> checkpoints. `train` is the whole story, read from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import yaml

from cache_tools.errors import StoreError
from train import checkpoint as checkpoints
from train.anchors import block_targets, block_tokens, sample_anchors, slot_weights
from train.attention import BlockLayout
from train.config import TrainConfig
from train.features import add_noise
from train.ledger import extend_hash, tokens_by_source
from train.loader import Loader, Pack, StepBatch
from train.metrics import Console, LoaderLoad, MetricsFile, StepMetrics
from train.objective import BlockSums, block_loss
from train.ranks import join
from train.run_files import run_lock, write_text
from train.schedule import cosine, learning_rate
from train.shared_context import SharedContext, block_slices, blocks_per_slice
from train.state import TrainingState, prepare
from train.validation import Validation


def train(config: TrainConfig, *, say: Callable[[str], None]) -> None:
    """Trains a drafter to `config.out`, from its newest checkpoint if there is one; under torchrun, one rank of it.

    `say` gets the console lines, on the first rank only. That rank alone writes to `config.out`.

    Raises DflashError for a store, a checkpoint or settings that do not fit, for unreadable samples and a full disk;
    OtherRankFailed when that happened on another rank.
    """
    with join(config.device) as ranks, ranks.stop_together():
        speak = say if ranks.is_first else _say_nothing
        state = prepare(config, speak, ranks)
        with run_lock(config.out) if ranks.is_first else nullcontext():
            _run(state, speak)


def _run(state: TrainingState, say: Callable[[str], None]) -> None:
    config, ranks = state.config, state.ranks
    if ranks.is_first:
        _begin_folder(state)
    validation = Validation(state, say)
    _save_if_due(state)
    metrics_file = MetricsFile(config.out / "metrics.jsonl", last_step=state.step) if ranks.is_first else None
    if state.step == state.total_steps:
        if metrics_file is not None:
            metrics_file.close()
        return
    console = Console(total_steps=state.total_steps, start_step=state.step)
    load = _LoadMeter()
    with state.open_loader() as loader, metrics_file or nullcontext():
        began = time.monotonic()
        for batch in loader:
            assert batch.step == state.step, "the loader and the optimizer must agree on the step"
            lr = learning_rate(
                state.step,
                total=state.total_steps,
                peak=config.lr,
                warmup_ratio=config.warmup_ratio,
                min_ratio=config.min_lr_ratio,
            )
            noise = cosine(state.step, total=state.total_steps, start=config.noise_start, end=config.noise_end)
            num_unreadable = _count_unreadable(state, batch, say)
            sums, grad_norm = train_step(state, batch, lr=lr, noise=noise)
            state.step, state.cursor = state.step + 1, batch.state
            state.order_hash = extend_hash(state.order_hash, batch.samples)

            now = time.monotonic()
            held_out = validation.if_due()
            metrics = StepMetrics(
                step=state.step,
                epoch=batch.epoch,
                loss=sums.mean_loss,
                acc=sums.accuracy,
                streak=sums.streak,
                lr=lr,
                noise=noise,
                grad_norm=grad_norm,
                tokens=batch.tokens,
                blocks=int(sums.blocks),
                slots=int(sums.valid_at.sum()),
                unreadable=num_unreadable,
                order_hash=f"{state.order_hash:016x}",
                source_tokens=tokens_by_source(state.store, batch.samples),
                validation=held_out,
                seconds=now - began,
            )
            began = time.monotonic()
            if metrics_file is not None:
                metrics_file.write(metrics)
            console.count(packs=config.packs_per_step, tokens=batch.tokens)
            if state.step in (1, state.total_steps) or state.step % config.log_every == 0:
                loads = ranks.gather(load.since_last(loader))
                say(console.line(metrics, LoaderLoad.over_ranks(loads)))
            # Before the next batch: if that cannot be read, what was learned so far is safe.
            _save_if_due(state)
            if state.step == state.total_steps:
                break


def _begin_folder(state: TrainingState) -> None:
    """Writes config.yaml. A run that starts anew drops the best checkpoint of an earlier one that was stopped before
    its first checkpoint: settings may differ, and nothing compares them.
    """
    settings = {name: value for name, value in state.config_plain.items() if name != "store_fingerprint"}
    write_text(state.config.out / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
    if state.saved_step is None:
        checkpoints.discard_best(state.config.out)


def train_step(state: TrainingState, batch: StepBatch, *, lr: float, noise: float) -> tuple[BlockSums, float]:
    """One optimizer update over all packs of the step; returns the metric sums and the gradient norm before clipping.

    The loss is the sum over all packs divided by the sum of weights over all packs: a mean of per-pack means would
    give tokens of packs with few supervised tokens a larger weight.
    """
    sums = BlockSums.zero(state.config.block_size, state.device)
    for pack in batch.packs:
        sums += _accumulate(state, batch, pack, noise)
    sums = _over_ranks(state, sums)
    if not sums.weight > 0:
        raise StoreError(
            "a step has no supervised block",
            where=_where(batch),
            fix="raise --anchors-per-step or --packs-per-step, or plan the store with a larger --min-supervised",
        )
    parameters = [p for p in state.drafter.parameters() if p.grad is not None]
    torch._foreach_div_([p.grad for p in parameters if p.grad is not None], float(sums.weight))
    grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, state.config.clip_norm))
    if not torch.isfinite(torch.tensor(grad_norm)):
        raise StoreError(
            "the gradient is not finite; nothing was updated",
            where=_where(batch),
            got=f"loss {sums.mean_loss}, gradient norm {grad_norm}",
            fix="check these samples with `dflash-cache show`, lower --lr, or train with --precision fp32",
        )
    state.optimizer.step(lr)
    if state.average is not None:
        state.average.update(batch.step + 1)
    return sums, grad_norm


def _over_ranks(state: TrainingState, sums: BlockSums) -> BlockSums:
    """Adds up the sums and the gradients of all ranks; one whose share of the step has no block adds zeros.

    Not DistributedDataParallel, which averages over ranks what each has divided by its own weight: that is the mean of
    means again, and a rank without a pack would count. Nor would it run a backward pass there, and the others wait.
    """
    vector = sums.vector()
    state.ranks.sum(vector)
    state.ranks.sum_gradients(state.drafter.parameters())
    return BlockSums.from_vector(vector)


def _where(batch: StepBatch) -> str:
    return f"step {batch.step}, samples {batch.samples[:20].tolist()}"


def _count_unreadable(state: TrainingState, batch: StepBatch, say: Callable[[str], None]) -> int:
    """Samples of the step, over all ranks, that could not be read and train nothing; names them.

    Raises StoreError when the run now has more of them than --max-unreadable.
    """
    if state.config.max_unreadable == 0:  # then the loader raises
        return 0
    own = {sample: " ".join(str(error).split()) for sample, error in batch.unreadable.items()}
    found = {sample: error for part in state.ranks.gather(own) for sample, error in part.items()}
    for sample, error in found.items():
        say(f"sample {sample} is left out of step {batch.step}: it cannot be read: {error}")
    state.num_unreadable += len(found)
    if state.num_unreadable > state.config.max_unreadable:
        raise StoreError(
            "too many samples cannot be read",
            where=f"{state.store.path}, step {batch.step}, samples {list(found)}",
            got=state.num_unreadable,
            expected=f"at most {state.config.max_unreadable} (--max-unreadable)",
            fix="check that the disk is mounted and healthy, and the store with `dflash-cache verify`; then run the "
            "same command again to resume",
        )
    return len(found)


def _accumulate(state: TrainingState, batch: StepBatch, pack: Pack, noise: float) -> BlockSums:
    """Forward and backward of one pack; adds the gradient of its weighted loss sum to the parameters."""
    config, device = state.config, state.device
    chosen = sample_anchors(
        pack.loss_mask.numpy(),
        pack.cu_seqlens.numpy(),
        pack.samples,
        seed=config.seed,
        step=batch.step,
        anchors_per_supervised=config.anchors_per_step / max(batch.supervised, 1),
    )
    if len(chosen) == 0:
        return BlockSums.zero(config.block_size, device)
    anchors, cu_seqlens, input_ids, loss_mask = (
        tensor.to(device, non_blocking=True)
        for tensor in (torch.from_numpy(chosen), pack.cu_seqlens, pack.input_ids, pack.loss_mask)
    )
    features = pack.tapped.to_features(device, state.compute_dtype, state.feature_scale)
    if noise > 0:
        features = add_noise(
            features,
            pack.cu_seqlens,
            pack.samples,
            scale=noise,
            unit=state.noise_unit,
            seed=config.seed,
            step=batch.step,
        )
    targets = block_targets(anchors, input_ids, loss_mask, cu_seqlens, config.block_size)
    embeds = state.embed(block_tokens(anchors, input_ids, config.block_size, config.mask_token_id))
    weights = slot_weights(targets.valid, config.slot_weights, config.slot_gamma)
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
    with mixed:
        positions = pack.positions.to(device, non_blocking=True)
        context = SharedContext(state.drafter.keys_values(state.drafter.context(features), positions))
    sums = BlockSums.zero(config.block_size, device)
    for blocks in block_slices(len(chosen), blocks_per_slice(config.block_size, device)):
        layout = BlockLayout(anchors[blocks], cu_seqlens, config.block_size)
        with mixed:
            hidden = state.drafter.blocks(embeds[blocks], context.rows, layout)
        output = block_loss(
            hidden,
            targets.labels[blocks],
            weights[blocks],
            state.head,
            teacher=state.teacher(pack.teacher, anchors[blocks]) if config.kl_weight > 0 else None,
            kl_weight=config.kl_weight,
            streak_aware=config.slot_weights == "dpace",
        )
        torch.autograd.backward(output.loss)
        sums += output.sums
    context.backward()
    return sums


def _say_nothing(_: str) -> None:
    return


def _save_if_due(state: TrainingState) -> None:
    if not (state.must_save() and state.ranks.is_first):
        return
    checkpoints.save(state.config.out, state.snapshot(), keep=state.config.keep_checkpoints)


@dataclass
class _LoadMeter:
    """Turns the loader's running totals into what happened since the last console line."""

    packs_read: int = 0
    wait_seconds: float = 0.0

    def since_last(self, loader: Loader) -> LoaderLoad:
        stats: Any = loader.stats()
        load = LoaderLoad(
            packs_read=stats.packs_read - self.packs_read,
            read_ahead=stats.q_read,
            packs_ready=stats.q_pack,
            wait_seconds=stats.wait_seconds - self.wait_seconds,
        )
        self.packs_read, self.wait_seconds = stats.packs_read, stats.wait_seconds
        return load
