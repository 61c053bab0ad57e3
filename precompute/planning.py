"""From data files to a planned store: which samples there are, where each lies, and what the manifest says.

Needs the target's config.json and tokenizer, never its weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_tools.errors import ConfigError, DataError, TargetError
from cache_tools.layer_ids import default_layer_ids
from cache_tools.layout import Layout, default_chunk_rows, default_shard_rows, plan_layout
from cache_tools.manifest import DataSpec, LayoutSpec, Manifest, SourceSpec, TargetSpec
from cache_tools.progress import progress_bar
from cache_tools.quantise import QUANTISED, arithmetic, parts
from cache_tools.teacher import Teacher
from cache_tools.template_args import parse_template_args
from precompute import fingerprints
from precompute.budget import largest_size, samples_within
from precompute.config import PrecomputeConfig, parse_bytes
from precompute.conversations import RawRow, SourceFile, find_sources, read_rows
from precompute.rows import RowProblem
from precompute.samples import SampleBuffer
from precompute.tokenizing import RowTokenizer, TokenRules, Tokens

SKIPPED_FILE = "skipped.jsonl"
LEFT_OUT = "no room within --max-bytes"
_ROWS_PER_BATCH = 256
_MB = 2**20


@dataclass(frozen=True)
class PlannedTarget:
    """What planning knows of the target. `max_positions` is None when its config does not say."""

    spec: TargetSpec
    tokenizer: Any
    layer_ids: tuple[int, ...]
    tokenizer_sha256: str
    template_sha256: str
    max_positions: int | None


@dataclass(frozen=True)
class SkippedRow:
    """One row that gave no sample. `where` is "file:number", counted from 1."""

    where: str
    reason: str
    detail: str
    row_id: str | None


@dataclass
class Tokenised:
    """All rows of the data, kept or skipped."""

    samples: SampleBuffer = field(default_factory=SampleBuffer)
    skipped: list[SkippedRow] = field(default_factory=list)
    rows_read: Counter[int] = field(default_factory=Counter)  # by source index
    num_left_out: int = 0  # usable rows for which --max-bytes has no room

    def skipped_by_reason(self) -> dict[str, int]:
        """Number of skipped rows for each reason, most frequent first."""
        reasons = Counter(row.reason for row in self.skipped)
        reasons += Counter({LEFT_OUT: self.num_left_out})
        return dict(reasons.most_common())

    def select(self, indices: NDArray[np.int64]) -> Tokenised:
        """The same with only these samples; the rest is left out."""
        num_left_out = len(self.samples) - len(indices)
        return dataclasses.replace(self, samples=self.samples.select(indices), num_left_out=num_left_out)


@dataclass(frozen=True)
class Plan:
    """Everything a store needs before the target runs."""

    manifest: Manifest
    layout: Layout
    tokenised: Tokenised
    files: dict[str, bytes]
    """Plain files that travel with the store, by name: the target's, and the list of skipped rows."""

    def ordered_tokens(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """Token ids and loss mask of each sample, in the order of the store."""
        return (self.tokenised.samples.tokens(int(index)) for index in self.layout.order)


def plan(config: PrecomputeConfig) -> Plan:
    """Reads and tokenises all data; writes nothing.

    Raises ConfigError, DataError or TargetError.
    """
    target = read_target(config)
    sources = find_sources(config.data)
    hashes = hash_sources(sources, config.threads)
    tokenised = usable_samples(config, target, sources)
    # From all samples: --max-bytes must not choose among stores of different layouts.
    chunk_rows = config.chunk_rows or default_chunk_rows(tokenised.samples.length, compressed=config.codec == "bf16")
    config = dataclasses.replace(config, chunk_rows=chunk_rows)

    def size_of(indices: NDArray[np.int64]) -> int:
        planned = _plan_of(config, target, sources, hashes, tokenised.select(indices))
        return largest_size(planned.manifest, planned.layout.length, planned.files)

    if config.max_bytes is not None:
        chosen = samples_within(len(tokenised.samples), size_of, parse_bytes(config.max_bytes))
        tokenised = tokenised if chosen is None else tokenised.select(chosen)
    return _plan_of(config, target, sources, hashes, tokenised)


def _plan_of(
    config: PrecomputeConfig,
    target: PlannedTarget,
    sources: list[SourceFile],
    hashes: list[str],
    tokenised: Tokenised,
) -> Plan:
    """The plan for samples and rows per chunk that are settled."""
    assert config.chunk_rows is not None
    lengths = tokenised.samples.length
    shard_rows = default_shard_rows(
        target.spec.hidden_size, int(lengths.max()), config.chunk_rows, config.shard_mb * _MB
    )
    layout = plan_layout(lengths, chunk_rows=config.chunk_rows, shard_rows=shard_rows)
    manifest = Manifest(
        target=target.spec,
        tokenizer_sha256=target.tokenizer_sha256,
        template_sha256=target.template_sha256,
        layer_ids=target.layer_ids,
        codec=config.codec,
        arithmetic=arithmetic(config.codec),
        teacher=config.teacher,
        layout=LayoutSpec(
            num_samples=layout.num_samples,
            num_tokens=layout.num_tokens,
            num_rows=layout.num_rows,
            chunk_rows=layout.chunk_rows,
            shard_rows=layout.shard_rows,
            samples_per_shard=layout.samples_per_shard,
        ),
        data=DataSpec(
            sources=_source_specs(sources, hashes, tokenised),
            settings=config.plan_settings(),
            skipped=tokenised.skipped_by_reason(),
        ),
    )
    return Plan(manifest, layout, tokenised, _store_files(config.target, tokenised))


def usable_samples(config: PrecomputeConfig, target: PlannedTarget, sources: list[SourceFile]) -> Tokenised:
    """The samples that the data gives with these settings, one or more.

    Raises DataError when no row is usable, TargetError when a sample is too long for the target.
    """
    rules = TokenRules(
        vocab_size=target.spec.vocab_size,
        loss_on=config.loss_on,
        max_length=config.max_length,
        on_long=config.on_long,
        min_supervised=config.min_supervised,
        template_args=parse_template_args(config.template_args),
    )
    tokenised = tokenise(sources, RowTokenizer(target.tokenizer, rules), config.limit)
    _require_samples(tokenised)
    _check_positions(int(tokenised.samples.length.max()), target, config)
    return tokenised


def manifest_now(config: PrecomputeConfig, stored: Manifest) -> Manifest:
    """The plan part of the manifest as the present target, data and settings would make it, without tokenising.

    Everything that follows from them (counts, places) is taken from `stored`, and so is the target's name.
    """
    target = read_target(config)
    sources = find_sources(config.data)
    before = dict(enumerate(stored.data.sources))
    specs = [
        SourceSpec(
            name=source.name,
            sha256=digest,
            num_rows=before[index].num_rows if index in before else 0,
            num_samples=before[index].num_samples if index in before else 0,
        )
        for index, (source, digest) in enumerate(zip(sources, hash_sources(sources, config.threads), strict=True))
    ]
    return dataclasses.replace(
        stored.plan(),
        target=dataclasses.replace(target.spec, name=stored.target.name),
        tokenizer_sha256=target.tokenizer_sha256,
        template_sha256=target.template_sha256,
        layer_ids=target.layer_ids,
        codec=config.codec,
        arithmetic=arithmetic(config.codec),
        teacher=config.teacher,
        layout=dataclasses.replace(stored.layout, chunk_rows=config.chunk_rows or stored.layout.chunk_rows),
        data=DataSpec(sources=tuple(specs), settings=config.plan_settings(), skipped=stored.data.skipped),
    )


def read_target(config: PrecomputeConfig) -> PlannedTarget:
    """Config, tokenizer and hashes of the target. Raises TargetError; ConfigError for what does not fit the target."""
    from transformers import AutoConfig, AutoTokenizer

    folder = config.target
    config_hash = fingerprints.config_sha256(folder)
    tokenizer_hash = fingerprints.tokenizer_sha256(folder)
    try:
        full_config = AutoConfig.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        template = tokenizer.get_chat_template() if tokenizer.chat_template is not None else None
    except Exception as error:  # damaged files make these libraries raise anything
        raise TargetError("transformers cannot read the target", where=folder, got=error) from error
    text_config = full_config.get_text_config(decoder=True)
    spec = TargetSpec(
        name=folder.resolve().name,
        model_type=str(text_config.model_type),
        config_sha256=config_hash,
        num_layers=int(text_config.num_hidden_layers),
        hidden_size=int(text_config.hidden_size),
        vocab_size=int(text_config.vocab_size),
        dtype=config.dtype,
    )
    if min(spec.num_layers, spec.hidden_size, spec.vocab_size) < 1:
        raise TargetError(
            "the target's config.json is damaged",
            where=folder,
            got=f"{spec.num_layers} layers, hidden size {spec.hidden_size}, vocabulary {spec.vocab_size}",
            expected="positive numbers",
        )
    _check_fits(config, spec)
    return PlannedTarget(
        spec=spec,
        tokenizer=tokenizer,
        layer_ids=_layer_ids(config, spec.num_layers),
        tokenizer_sha256=tokenizer_hash,
        template_sha256=fingerprints.template_sha256(template),
        max_positions=getattr(text_config, "max_position_embeddings", None),
    )


def hash_sources(sources: list[SourceFile], threads: int | None) -> list[str]:
    """SHA-256 of every source file. Raises DataError if one cannot be read."""
    paths = [source.path for source in sources]
    try:
        total = sum(path.stat().st_size for path in paths)
        with progress_bar(total=total, unit="B", desc="hash data") as bar:
            return fingerprints.files_sha256(paths, num_threads=threads or os.cpu_count() or 1, progress=bar)
    except OSError as error:
        raise DataError("a data file cannot be read", where=error.filename, got=error) from error


def tokenise(sources: list[SourceFile], tokenizer: RowTokenizer, limit: int | None) -> Tokenised:
    """All rows of all sources in order, up to the first `limit` samples."""
    done = Tokenised()
    total = sum(source.path.stat().st_size for source in sources)
    with progress_bar(total=total, unit="B", desc="tokenise") as bar:
        for index, source in enumerate(sources):
            position = 0
            for batch in _batches(read_rows(index, source)):
                _tokenise_batch(batch, source, tokenizer, limit, done)
                bar.update(batch[-1].position - position)
                position = batch[-1].position
                if limit is not None and len(done.samples) >= limit:
                    return done
    return done


def _tokenise_batch(
    batch: list[RawRow], source: SourceFile, tokenizer: RowTokenizer, limit: int | None, done: Tokenised
) -> None:
    results = iter(tokenizer.tokenize([row.value for row in batch if row.value is not None]))
    for row in batch:
        if limit is not None and len(done.samples) >= limit:
            return
        done.rows_read[row.source] += 1
        result: Tokens | RowProblem = RowProblem(row.problem or "") if row.value is None else next(results)
        if isinstance(result, Tokens):
            done.samples.add(result, source=row.source, row=row.number)
        else:
            row_id = None if row.value is None else row.value.get("id")
            where = f"{source.name}:{row.number + 1}"
            done.skipped.append(
                SkippedRow(where, result.reason, result.detail, None if row_id is None else str(row_id))
            )


def _batches(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    batch: list[RawRow] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _ROWS_PER_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _check_fits(config: PrecomputeConfig, spec: TargetSpec) -> None:
    """Raises ConfigError when the target's sizes rule out the codec or the teacher: before hours of tokenising."""
    if config.codec in QUANTISED:
        parts(config.codec, spec.hidden_size)
    if Teacher.parse(config.teacher).k > spec.vocab_size:
        raise ConfigError(
            "the teacher has more tokens than the target's vocabulary",
            got=f"--teacher {config.teacher}",
            expected=f"at most topk:{spec.vocab_size}",
        )


def _layer_ids(config: PrecomputeConfig, num_layers: int) -> tuple[int, ...]:
    if config.layer_ids is None:
        return default_layer_ids(num_layers, config.num_draft_layers)
    ids = config.layer_ids
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_layers:
        raise ConfigError(
            "layer ids do not fit the target",
            got=",".join(map(str, ids)) or "none",
            expected=f"ascending different numbers from 0 to {num_layers - 1}",
        )
    return ids


def _source_specs(sources: list[SourceFile], hashes: list[str], tokenised: Tokenised) -> tuple[SourceSpec, ...]:
    kept = np.bincount(tokenised.samples.source, minlength=len(sources))
    return tuple(
        SourceSpec(
            name=source.name,
            sha256=digest,
            num_rows=tokenised.rows_read[index],
            num_samples=int(kept[index]),
        )
        for index, (source, digest) in enumerate(zip(sources, hashes, strict=True))
    )


def _store_files(target: Path, tokenised: Tokenised) -> dict[str, bytes]:
    files = fingerprints.target_files(target)
    lines = [
        json.dumps({"where": row.where, "id": row.row_id, "reason": row.reason, "detail": row.detail})
        for row in tokenised.skipped
    ]
    if lines:
        files[SKIPPED_FILE] = ("\n".join(lines) + "\n").encode()
    return files


def _require_samples(tokenised: Tokenised) -> None:
    if len(tokenised.samples):
        return
    if not tokenised.skipped:
        raise DataError("the data holds no rows", fix="check the files given with --data")
    examples = {row.reason: f"{row.where} {row.detail}".strip() for row in reversed(tokenised.skipped)}
    histogram = "; ".join(
        f"{count} x {reason} (first: {examples[reason]})" for reason, count in tokenised.skipped_by_reason().items()
    )
    raise DataError("every row was skipped", got=histogram, expected="at least one usable row")


def _check_positions(longest: int, target: PlannedTarget, config: PrecomputeConfig) -> None:
    if target.max_positions is not None and longest > target.max_positions:
        raise TargetError(
            "a sample is longer than the target's positions reach",
            where=config.target,
            got=f"{longest} tokens",
            expected=f"at most {target.max_positions} (max_position_embeddings)",
            fix=f"--max-length {target.max_positions}",
        )
