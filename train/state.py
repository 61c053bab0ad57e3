"""The state of a training run: store, drafter, optimizer and position, fresh or from a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.errors import ConfigError, StoreError
from cache_tools.packs import PackPlan
from cache_tools.reader import Store
from cache_tools.settings import to_plain
from train import checkpoint as checkpoints
from train.batches import TeacherRows
from train.checkpoint import Checkpoint
from train.config import TrainConfig
from train.cost import describe_step
from train.devices import pick_device
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.features import channel_rms
from train.init_drafter import start_from_drafter
from train.loader import Loader, pack_plan
from train.objective import OutputHead
from train.optimizers import Optimizers, WeightAverage
from train.ranks import Ranks
from train.refusals import refuse_changes, refuse_different_ranks, refuse_other_shape
from train.selection import supervised_tokens, training_samples
from train.target_parts import FinalNorm, TargetParts, reserved_tokens
from train.teacher import BlockTeacher, block_teacher, require_teacher
from train.warm_start import copy_last_layers, read_deepest_tap, use_target_norm
from train.warnings import warnings


@dataclass
class TrainingState:
    """Everything the loop touches. `step` and `cursor` move on; the rest stays."""

    config: TrainConfig
    config_plain: dict[str, Any]
    store: Store
    plan: PackPlan
    """The packs of every step."""
    layer_ids: tuple[int, ...]
    ranks: Ranks
    device: torch.device
    drafter: DFlashDrafter
    drafter_plain: dict[str, Any]
    embedding: Tensor
    """[V, H], frozen."""
    head: OutputHead
    final_norm: FinalNorm
    """The target's, for a teacher that is its last hidden state."""
    optimizer: Optimizers
    average: WeightAverage | None
    """Running average of the drafter's weights, if --ema-decay asks for one."""
    feature_scale: Tensor
    """[F*H]; context features are multiplied by it, and export folds it into `fc`."""
    noise_unit: Tensor
    """[F*H]; RMS of the scaled features of each layer."""
    total_steps: int
    step: int
    """Optimizer steps done."""
    saved_step: int | None
    """Step of the newest checkpoint."""
    cursor: dict[str, Any]
    """Where the next step's packs begin; empty at the very start."""
    order_hash: int
    """Hash of which samples the steps so far trained on."""
    num_unreadable: int
    """Samples left out so far because they could not be read."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of activations outside autocast."""
        return torch.bfloat16 if self.config.precision == "bf16" else torch.float32

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H] of token ids [...] in the compute type."""
        return torch.nn.functional.embedding(tokens, self.embedding).to(self.compute_dtype)

    def teacher(self, rows: TeacherRows | None, anchors: Tensor) -> BlockTeacher:
        """The teacher of the blocks at `anchors` of a pack; a loader for a run with --kl-weight delivers its rows."""
        assert rows is not None, "the pack has no teacher rows"
        return block_teacher(rows, anchors, self.config.block_size, self.final_norm)

    def must_save(self) -> bool:
        """True before a step that a checkpoint is due for, and when all steps are done. Remembers that it was asked."""
        due = self.step == self.total_steps or (self.step > 0 and self.step % self.config.checkpoint_every == 0)
        due = due and self.step != self.saved_step
        if due:
            self.saved_step = self.step
        return due

    def snapshot(self) -> Checkpoint:
        """All that resuming from here needs. Its tensors are the live ones."""
        return Checkpoint(
            step=self.step,
            weights=self.drafter.state_dict(),
            feature_scale=self.feature_scale.float(),
            average=self.average.state_dict() if self.average is not None else {},
            optimizer=self.optimizer.state_dict(),
            drafter=self.drafter_plain,
            config=self.config_plain,
            cursor=self.cursor,
            order_hash=f"{self.order_hash:016x}",
            num_unreadable=self.num_unreadable,
        )

    def open_loader(self) -> Loader:
        """A loader that starts at `cursor`."""
        return Loader(
            self.store,
            self.plan,
            layer_ids=self.layer_ids,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            start_state=self.cursor or None,
            prefetch_bytes=self.config.prefetch_mb * 1_000_000,
            num_threads=self.config.reader_threads,
            skip_unreadable=self.config.max_unreadable > 0,
            with_teacher=self.config.kl_weight > 0,
        )


def prepare(config: TrainConfig, say: Callable[[str], None], ranks: Ranks | None = None) -> TrainingState:
    """Opens the store and builds the drafter; continues from the newest checkpoint of `config.out` if there is one.

    Without `ranks` this process trains alone. Every rank starts with the same weights.

    Raises ConfigError, StoreError or CheckpointError, naming every setting that does not fit.
    """
    ranks = ranks or Ranks(device=pick_device(config.device))
    device = ranks.device
    store = Store.open(config.store)
    store.require_complete()
    require_teacher(config, store)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    newest = ranks.gather(checkpoints.latest(config.out))[0]
    previous = checkpoints.load(newest) if newest is not None else None
    config_plain = {**to_plain(config), "store_fingerprint": store_fingerprint(store)}
    if previous is not None:
        refuse_changes(previous, config_plain)

    layer_ids = _layer_ids(config, store)
    drafter_config = drafter_config_for(config, store, layer_ids)
    if previous is not None:
        refuse_other_shape(previous, drafter_config, config)
    drafter = DFlashDrafter(drafter_config, seed=config.seed)
    samples = training_samples(config, store)
    scale, unit = _feature_scale(config, store, layer_ids, np.unique(samples), previous)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    parts = TargetParts.from_store(store, device=device, dtype=dtype)
    plan = pack_plan(
        store,
        seed=config.seed,
        token_budget=config.token_budget,
        packs_per_step=config.packs_per_step,
        samples=samples,
        order=config.order,
    )
    refuse_different_ranks(ranks, {**config_plain, "data_order": plan.fingerprint})
    total_steps = plan.num_steps(config.epochs) if config.steps is None else config.steps
    head = _head(config, store, parts, np.unique(samples))
    say(_describe(config, store, drafter, layer_ids, total_steps))
    say(describe_step(config, drafter_config, store, plan.lengths, head_rows=head.weight.shape[0]))
    for line in warnings(config, store, samples, float(plan.lengths.sum() / _tokens_per_step(config))):
        say(line)
    if previous is not None:
        drafter.load_state_dict(previous.weights)
        say(f"resuming at step {previous.step} of {total_steps} from {newest}")
    else:
        _warm_start(config, store, drafter, parts, scale, say)
    drafter.to(device)
    scale = scale.to(device)
    ranks.broadcast([*drafter.state_dict().values(), scale])
    optimizer = Optimizers(config, drafter)
    average = WeightAverage(drafter, config.ema_decay) if config.ema_decay > 0 else None
    if previous is not None:
        optimizer.load_state_dict(previous.optimizer)
        if average is not None:
            average.load_state_dict(previous.average)

    return TrainingState(
        config=config,
        config_plain=config_plain,
        store=store,
        plan=plan,
        layer_ids=layer_ids,
        ranks=ranks,
        device=device,
        drafter=drafter,
        drafter_plain=dataclasses.asdict(drafter_config),
        embedding=parts.embedding,
        head=head,
        final_norm=parts.norm,
        optimizer=optimizer,
        average=average,
        feature_scale=scale.to(dtype),
        noise_unit=unit.to(device),
        total_steps=total_steps,
        step=previous.step if previous is not None else 0,
        saved_step=previous.step if previous is not None else None,
        cursor=previous.cursor if previous is not None else {},
        order_hash=int(previous.order_hash, 16) if previous is not None else 0,
        num_unreadable=previous.num_unreadable if previous is not None else 0,
    )


def store_fingerprint(store: Store) -> str:
    """Changes when the store holds other states, samples or teachers: resumption must not mix two stores.

    Of which layers it holds a run cares only about those that it taps, which are compared by number.
    """
    manifest = store.manifest
    return f"{manifest.target.weights_sha256}:{dataclasses.replace(manifest, layer_ids=()).plan_checksum()}"


def target_config(store: Store) -> dict[str, Any]:
    """config.json of the store's target."""
    plain: dict[str, Any] = json.loads(store.target_file("config.json").read_text(encoding="utf-8"))
    return plain


def drafter_config_for(config: TrainConfig, store: Store, layer_ids: tuple[int, ...]) -> DrafterConfig:
    """The drafter's shape: the target's where a flag does not say otherwise."""
    for token, name in reserved_tokens(store).items():
        if token == config.mask_token_id:
            raise ConfigError(
                f"mask_token_id is the target's {name}",
                got=f"--mask-token-id {token}",
                expected="a token that never occurs in conversations",
                fix="choose a reserved special token of the tokenizer",
            )
    num_layers = config.num_draft_layers or len(layer_ids)
    if config.num_sliding_layers > num_layers:
        raise ConfigError(
            "more sliding layers than draft layers",
            got=f"--num-sliding-layers {config.num_sliding_layers}",
            expected=f"at most {num_layers}",
        )
    num_full = num_layers - config.num_sliding_layers
    return DrafterConfig.for_target(
        target_config(store),
        num_layers=num_layers,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=layer_ids,
        layer_types=("sliding_attention",) * config.num_sliding_layers + ("full_attention",) * num_full,
        sliding_window=config.sliding_window if config.num_sliding_layers else None,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _layer_ids(config: TrainConfig, store: Store) -> tuple[int, ...]:
    chosen = config.layer_ids or store.layer_ids
    missing = [i for i in chosen if i not in store.layer_ids]
    if missing:
        raise StoreError(
            "the store lacks layers that the drafter should tap",
            where=store.path,
            got=f"--layer-ids {list(chosen)}",
            expected=f"some of {list(store.layer_ids)}",
            fix="choose among these, or precompute a store with the others",
        )
    return tuple(chosen)


def _warm_start(
    config: TrainConfig,
    store: Store,
    drafter: DFlashDrafter,
    parts: TargetParts,
    scale: Tensor,
    say: Callable[[str], None],
) -> None:
    """What a fresh drafter takes over: everything from --init-drafter, or from its target the output norm, and with
    --init-target the last layers.
    """
    if config.init_drafter is not None:
        start_from_drafter(drafter, config.init_drafter, scale)
        say(f"all weights start as those of {config.init_drafter}")
        return
    use_target_norm(drafter, parts)
    if config.init_target is not None:
        plain = target_config(store)
        copied = copy_last_layers(drafter, config.init_target, plain, norm_adds_one=parts.norm_adds_one)
        read_deepest_tap(drafter, scale)
        say(f"{len(copied)} tensors start as those of the target's last layers")


def _feature_scale(
    config: TrainConfig,
    store: Store,
    layer_ids: tuple[int, ...],
    samples: NDArray[np.int64],
    previous: Checkpoint | None,
) -> tuple[Tensor, Tensor]:
    """(scale, noise unit), float32 [F*H] each. A whitened run that resumes has them, and reads no sample for them."""
    if config.whiten and previous is not None:
        return previous.feature_scale, torch.ones_like(previous.feature_scale)
    rms = channel_rms(store, layer_ids, samples, skip_unreadable=config.max_unreadable > 0)
    if config.whiten:
        return (1.0 / rms).flatten(), torch.ones(rms.numel())
    layer_rms = rms.square().mean(dim=1, keepdim=True).sqrt().expand_as(rms)
    return torch.ones(rms.numel()), layer_rms.flatten().contiguous()


def _head(config: TrainConfig, store: Store, parts: TargetParts, samples: NDArray[np.int64]) -> OutputHead:
    """The target's output head; with --loss-vocab seen, of the tokens supervised in `samples`, which ascend."""
    if config.loss_vocab == "full":
        return OutputHead(parts.lm_head)
    seen = supervised_tokens(store, samples, num_tokens=parts.lm_head.shape[0])
    return OutputHead.restricted(parts.lm_head, torch.from_numpy(seen).to(parts.lm_head.device))


def _tokens_per_step(config: TrainConfig) -> int:
    return config.token_budget * config.packs_per_step


def _describe(config: TrainConfig, store: Store, drafter: DFlashDrafter, layers: tuple[int, ...], steps: int) -> str:
    parameters = sum(p.numel() for p in drafter.parameters())
    return (
        f"{store.num_samples:,} samples, {store.num_tokens:,} tokens; drafter: {drafter.config.num_hidden_layers} "
        f"layers, {parameters / 1e6:.1f} M parameters, block {config.block_size}, taps {list(layers)}; {steps} steps"
    )
