"""Settings of `dflash-precompute`: one frozen dataclass, shared by `plan` and `run`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from cache_tools.codec_names import Codec
from cache_tools.errors import ConfigError
from cache_tools.teacher import Teacher
from cache_tools.template_args import parse_template_args


@dataclass(frozen=True, kw_only=True)
class PrecomputeConfig:
    """What to read, how to tokenise it, which layers of the target to keep, and how to run the target."""

    target: Path
    """Folder of the target model: config.json, tokenizer, and (for `run`) weights."""

    data: tuple[Path, ...]
    """Conversations: .jsonl, .jsonl.gz, .json or .parquet files, folders of them, or a saved `datasets` folder."""

    store: Path | None = None
    """Folder of the hidden-state store. `plan` without it only reports."""

    num_draft_layers: int = 5
    """Layers of the drafter to be trained; decides which target layers are kept unless --layer-ids is given."""

    layer_ids: tuple[int, ...] | None = None
    """0-based target layers whose outputs are kept, ascending."""

    max_length: int = 4096
    """Longest sample in tokens."""

    on_long: Literal["truncate", "skip"] = "truncate"
    """What to do with a longer row: keep its first tokens, or skip it."""

    loss_on: Literal["assistant", "all"] = "assistant"
    """Which tokens are supervised: the assistant's content and end token, or every token."""

    template_args: tuple[str, ...] = ()
    """Variables for the chat template as NAME=JSON, for example enable_thinking=false."""

    min_supervised: int = 2
    """Skip rows with fewer supervised tokens than this."""

    limit: int | None = None
    """Keep only the first N usable rows."""

    max_bytes: str | None = None
    """Plan no more samples than surely fit into a store of this size, for example 500GB; a fixed random choice of them.
    Lossless compression usually leaves a fifth of it unused."""

    codec: Codec = "bf16"
    """How hidden states are stored: bf16 (compressed) and raw are lossless, int8, fp8 and int4 quantised."""

    teacher: str = "none"
    """What to keep of the target's prediction, for distillation: none, hidden (its last hidden state where the next
    token is supervised), hidden:all (everywhere), or topk:K (its K likeliest next tokens)."""

    chunk_rows: int | None = None
    """Tokens per chunk, the smallest part of the store that is read or checked by itself; every sample is padded to
    whole chunks. Default: 64 for bf16, which compresses padding away, else 64, 32 or 16, fewer the shorter the samples
    are; for a store that exists, what it has."""

    shard_mb: int = 256
    """Size of one shard object before compression, in MB."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision in which the target runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the target runs; auto takes all visible GPUs if there are any."""

    workers: int | None = None
    """Processes that run the target. Default: one per GPU, or one on the CPU."""

    batch_tokens: int = 16384
    """Most tokens (padding included) in one forward pass; a longer single sample runs alone."""

    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation of the target."""

    on_bad: Literal["fail", "skip"] = "fail"
    """What to do with a sample whose hidden states are NaN, Inf, all zero or constant."""

    threads: int | None = None
    """CPU threads for all workers together. Default: all cores."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("no data given", fix="pass --data FILE, once per file or folder")
        for name in ("num_draft_layers", "max_length", "min_supervised", "shard_mb", "batch_tokens"):
            self._require_positive(name)
        for name in ("limit", "chunk_rows", "workers", "threads"):
            if getattr(self, name) is not None:
                self._require_positive(name)
        if self.min_supervised > self.max_length:
            raise ConfigError(
                "no row can pass: min_supervised is larger than max_length",
                got=f"min_supervised={self.min_supervised}, max_length={self.max_length}",
            )
        if self.attention == "flash_attention_2" and self.dtype != "bfloat16":
            raise ConfigError("flash_attention_2 needs --dtype bfloat16", got=f"--dtype {self.dtype}")
        parse_template_args(self.template_args)
        if self.max_bytes is not None:
            parse_bytes(self.max_bytes)
        Teacher.parse(self.teacher)

    def _require_positive(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise ConfigError(f"{name} must be at least 1", got=getattr(self, name))

    def plan_settings(self) -> dict[str, Any]:
        """The settings that decide which tokens are stored and where, as JSON values for the manifest."""
        return {
            "max_length": self.max_length,
            "on_long": self.on_long,
            "loss_on": self.loss_on,
            "template_args": [
                f"{k}={json.dumps(v)}" for k, v in sorted(parse_template_args(self.template_args).items())
            ],
            "min_supervised": self.min_supervised,
            "limit": self.limit,
            "max_bytes": None if self.max_bytes is None else parse_bytes(self.max_bytes),
            "shard_mb": self.shard_mb,
        }


@dataclass(frozen=True, kw_only=True)
class CodecsConfig:
    """What to measure codecs on: a target's hidden states of the first usable rows of the data."""

    target: Path
    """Folder of the target model: config.json, tokenizer and weights."""

    data: tuple[Path, ...]
    """Conversations, as for `run`."""

    num_draft_layers: int = 5
    """Layers of the drafter to be trained; decides which target layers are tapped unless --layer-ids is given."""

    layer_ids: tuple[int, ...] | None = None
    """0-based target layers to measure, ascending."""

    max_length: int = 4096
    """Tokens after which a sample is cut off."""

    template_args: tuple[str, ...] = ()
    """Variables for the chat template as NAME=JSON, for example enable_thinking=false."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision in which the target runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the target runs; auto takes the first GPU if there is one."""

    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation of the target."""

    def sample_settings(self, limit: int) -> PrecomputeConfig:
        """Settings that give the first `limit` samples. Raises ConfigError for impossible ones."""
        return PrecomputeConfig(**{field.name: getattr(self, field.name) for field in fields(self)}, limit=limit)


def parse_bytes(text: str) -> int:
    """ "500GB" -> 500,000,000,000; kB, MB, GB and TB count in thousands, KiB to TiB in 1024s. Raises ConfigError."""
    found = re.fullmatch(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>B|[kKMGT]i?B)?", text.strip())
    if found is None or float(found["number"]) <= 0:
        raise ConfigError(
            "not a number of bytes", got=repr(text), expected="for example 2000000, 500GB, 1.5TB or 64GiB"
        )
    unit = (found["unit"] or "B").upper()
    base = 1024 if "I" in unit else 1000
    return int(Decimal(found["number"]) * base ** "BKMGT".index(unit[0]))
