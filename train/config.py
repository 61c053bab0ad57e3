"""Settings of `dflash-train`, checked when they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from cache_tools.errors import ConfigError
from cache_tools.settings import flag_name
from cache_tools.template_args import parse_template_args

# Weights of the paper (arXiv 2602.06036, A.1): the larger the block, the slower the weight decays over its slots.
GAMMA_OF_BLOCK_SIZE = {8: 4.0, 10: 5.0, 16: 7.0}


def default_gamma(block_size: int) -> float:
    """The decay constant of the slot weights, in slots, where nobody chose one."""
    return GAMMA_OF_BLOCK_SIZE.get(block_size, block_size / 2.2)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides what `dflash-train run` computes."""

    store: Path
    """Hidden-state store written by dflash-precompute; it must be complete."""
    out: Path
    """Folder of this run: config.yaml, metrics.jsonl and checkpoints. Run the same command again to resume."""

    block_size: int = 16
    """Slots of a block, the anchor included; the drafter proposes block_size - 1 tokens."""
    num_draft_layers: int | None = None
    """Layers of the drafter. Default: as many as layers are tapped."""
    layer_ids: tuple[int, ...] | None = None
    """Tapped target layers (0-based), any subset of what the store holds. Default: all of them."""
    num_sliding_layers: int = 0
    """How many of the first draft layers attend through a sliding window, causal inside the block."""
    sliding_window: int = 2048
    """Tokens a sliding layer can see, its own slot included."""
    num_heads: int | None = None
    """Query heads of a draft layer. Default: the target's."""
    num_kv_heads: int | None = None
    """Key/value heads of a draft layer. Default: the target's."""
    head_dim: int | None = None
    """Size of a head. Default: the target's."""
    intermediate_size: int | None = None
    """Width of a draft layer's MLP. Default: the target's."""
    mask_token_id: int
    """Token id that fills slots 1.. of a block. Never the pad or end token; 248070 for Qwen3.5/3.6."""
    init_target: Path | None = None
    """Folder of the target: draft layers start as its last layers where shapes match, fc as the deepest tap."""
    init_drafter: Path | None = None
    """Drafter to start from: z-lab or speculators checkpoint, or a run. It must be what these settings train."""
    whiten: bool = True
    """Divide context features by fixed per-channel scales of the store; folded into fc at export."""

    token_budget: int = 49152
    """Most tokens in one pack (one forward pass). No sample may be longer."""
    packs_per_step: int = 8
    """Packs of one optimizer step over all ranks together; fixes what a step is, whatever the number of GPUs."""
    anchors_per_step: int = 4096
    """Blocks trained per step over all ranks together, drawn in proportion to supervised tokens."""
    epochs: float = 6.0
    """Passes over the store. Ignored when steps is given."""
    steps: int | None = None
    """Optimizer steps in total. 0 writes the untrained drafter and stops."""
    order: Literal["global", "sorted-static", "sorted-chunks", "random-padded", "bucketed"] = "global"
    """How samples are batched. global: a true shuffle, packed. The others are for comparison, and worse."""
    validation_share: float = 0.0
    """Part of the samples that is not trained on, chosen by content: duplicates are on one side only."""
    source_weights: tuple[str, ...] = ()
    """NAME=WEIGHT: how often an epoch holds a data source, for example 2, 0.25 or 1/3. Default: each once."""
    seed: int = 0
    """Seed of data order, anchors, noise and initial weights."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for all matrices (momentum 0.95, steps as large as AdamW's) with AdamW for the rest."""
    lr: float = 6e-4
    """Peak learning rate."""
    warmup_ratio: float = 0.04
    """Share of all steps over which the learning rate rises linearly."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of the cosine, as a share of the peak."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only."""
    clip_norm: float = 1.0
    """Largest gradient norm; larger ones are scaled down to it."""
    ema_decay: float = 0.0
    """Keep an average of the weights, this share of it from step to step; export and eval take it. 0: none."""
    kl_weight: float = 0.0
    """0: cross entropy with the data's tokens. 1: KL to the target's distribution, from the store. Else a mixture."""
    slot_weights: Literal["decay", "uniform", "dpace"] = "decay"
    """How slots weigh: by exponential decay, all alike, or by what the acceptance length owes to them (D-PACE)."""
    gamma: float | None = None
    """Of decay: slot k weighs exp(-(k-1)/gamma). Default: 4, 5, 7 for block sizes 8, 10, 16, else block_size / 2.2."""
    loss_vocab: Literal["full", "seen"] = "full"
    """Tokens the training softmax runs over: all, or only those supervised in the training samples (faster)."""
    noise_start: float = 0.0
    """Noise on context features at the first step, in units of each tapped layer's RMS."""
    noise_end: float = 0.0
    """The same at the last step; a cosine leads from one to the other."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: autocast with fp32 master weights. fp32: everything in fp32 (bit-exact resume on CPU)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. auto: cuda when there is one."""
    threads: int | None = None
    """Compute threads on the CPU. Default: torch's choice."""
    reader_threads: int = 4
    """Threads that read and decode hidden states. More than cores: some decode while others wait for the disk."""
    prefetch_mb: int = 512
    """Most megabytes of hidden states read ahead beyond the step in hand, per process; at least one pack."""
    max_unreadable: int = 0
    """Most samples that may be left out because they cannot be read, each time counted; then the run stops."""
    log_every: int = 10
    """Steps between console lines; metrics.jsonl gets every step."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay on disk, besides the best one."""
    validate_every: int | None = None
    """Steps between looks at the held-out samples; 0: never. Default: as checkpoints, with a --validation-share."""
    validation_samples: int = 64
    """Most held-out samples used while training, always the same ones; they are read anew each time."""

    def __post_init__(self) -> None:
        """Raises ConfigError naming the first setting that cannot work."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{field.name} must be a finite number", got=value)
        _at_least("block_size", self.block_size, 2)
        for name in ("token_budget", "packs_per_step", "anchors_per_step", "reader_threads", "prefetch_mb"):
            _at_least(name, getattr(self, name), 1)
        for name in ("log_every", "checkpoint_every", "keep_checkpoints", "sliding_window", "validation_samples"):
            _at_least(name, getattr(self, name), 1)
        for name in (
            "num_draft_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "threads",
        ):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in (
            "num_sliding_layers",
            "steps",
            "noise_start",
            "noise_end",
            "weight_decay",
            "mask_token_id",
            "max_unreadable",
            "validate_every",
        ):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0)
        for name in ("lr", "clip_norm", "epochs", "gamma"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive", got=getattr(self, name))
        for name in ("warmup_ratio", "min_lr_ratio", "validation_share", "kl_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie between 0 and 1", got=getattr(self, name))
        for name in ("beta1", "beta2", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 0 and less than 1", got=getattr(self, name))
        if self.gamma is not None and self.slot_weights != "decay":
            raise ConfigError(
                "gamma has no effect without decaying slot weights",
                got=f"--gamma {self.gamma} --slot-weights {self.slot_weights}",
                fix="use --slot-weights decay, or leave --gamma out",
            )
        if self.sliding_window != TrainConfig.sliding_window and not self.num_sliding_layers:
            raise ConfigError(
                "sliding_window has no effect without sliding layers",
                got=f"--sliding-window {self.sliding_window}",
                fix="give --num-sliding-layers, or leave --sliding-window out",
            )
        if self.init_target is not None and self.init_drafter is not None:
            raise ConfigError("init_target and init_drafter exclude each other", fix="give only one of them")
        if self.validate_every and not self.validation_share:
            raise ConfigError("no sample is held out to validate with", fix="give --validation-share, for example 0.02")

    @property
    def steps_between_validations(self) -> int:
        """0: the held-out samples are not looked at."""
        if self.validate_every is None:
            return self.checkpoint_every if self.validation_share else 0
        return self.validate_every

    @property
    def slot_gamma(self) -> float:
        """The decay constant of the slot weights, in slots."""
        return default_gamma(self.block_size) if self.gamma is None else self.gamma


# What may change between a run and its resumption: none of these alters what is computed.
RESUMABLE_CHANGES = frozenset(
    {"out", "store", "threads", "reader_threads", "prefetch_mb", "log_every", "checkpoint_every"}
    | {"keep_checkpoints", "validate_every", "init_target", "init_drafter", "max_unreadable"}
)


_ONLY_WITH_TARGET = ("prompts", "max_prompts", "template_args", "temperature", "seed", "plain")
_ONLY_FROM_STORE = ("samples", "max_samples")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Settings of `dflash-train eval`."""

    target: Path | None = None
    """Folder of the target model with tokenizer and weights: real speculative decoding of --prompts."""
    store: Path | None = None
    """Instead: a store whose answers are walked block by block. Exact if the target generated them greedily."""
    drafter: Path
    """Exported or published drafter (z-lab or speculators), or the folder of a training run."""
    checkpoint: Literal["last", "best"] = "last"
    """Which checkpoint of a training run: the newest, or the one with the highest acceptance length in validation."""
    max_new_tokens: int = 128
    """Most tokens generated per prompt, or walked of each stored answer."""
    prompts: tuple[Path, ...] = ()
    """With --target: JSONL files with `messages`; everything up to the last user message is the prompt."""
    max_prompts: int | None = None
    """With --target: use only the first so many prompts of each file."""
    template_args: tuple[str, ...] = ()
    """With --target: variables for the chat template as NAME=JSON, as the store was planned with."""
    temperature: float = 0.0
    """With --target: 0 decodes greedily. Above, tokens are drawn, and drafts kept or refused without loss."""
    seed: int = 0
    """With --temperature: seed of the draws."""
    plain: bool = True
    """With --target: also decode without the drafter, to compare output and speed."""
    samples: tuple[int, ...] = ()
    """With --store: these samples. Default: those that the drafter's run held out, else all."""
    max_samples: int | None = None
    """With --store: at most so many samples, always the same ones."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32: greedy output must be identical with and without drafter, else exit 1. bfloat16: for speed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. auto: cuda when there is one."""
    threads: int | None = None
    """Compute threads on the CPU. Default: torch's choice."""

    def __post_init__(self) -> None:
        """Raises ConfigError naming the first setting that cannot work."""
        _at_least("max_new_tokens", self.max_new_tokens, 1)
        for name in ("max_prompts", "max_samples", "threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError("temperature must be 0 or more", got=self.temperature)
        if self.seed and not self.temperature:
            raise ConfigError("greedy decoding draws nothing", got=f"--seed {self.seed}", fix="give --temperature")
        if (self.target is None) == (self.store is None):
            raise ConfigError(
                "evaluate against the target, or from a store",
                got="neither" if self.target is None else "both",
                fix="give --target TARGET with --prompts FILE.jsonl, or --store STORE",
            )
        defaults = {field.name: field.default for field in fields(self)}
        other = _ONLY_FROM_STORE if self.store is None else _ONLY_WITH_TARGET
        misplaced = [flag_name(name) for name in other if getattr(self, name) != defaults[name]]
        if misplaced:
            raise ConfigError(
                f"this has no meaning {'with --target' if self.store is None else 'with --store'}",
                got=", ".join(misplaced),
                fix="leave it out",
            )
        parse_template_args(self.template_args)
        if self.target is not None and not self.prompts:
            raise ConfigError("no prompts", fix="give --prompts FILE.jsonl")


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{name} is too small", got=value, expected=f">= {least}")
