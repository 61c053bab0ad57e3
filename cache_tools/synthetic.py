"""Small stores with random contents, for tests and trials without a target model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import scale_arrays
from cache_tools.codec_names import Codec
from cache_tools.codecs import float32_to_bf16_bits
from cache_tools.layout import Layout, plan_layout, round_up
from cache_tools.manifest import DataSpec, EngineSpec, LayoutSpec, Manifest, SourceSpec, TargetAttributes, TargetSpec
from cache_tools.quantise import ChannelCalibration, arithmetic
from cache_tools.reader import Store
from cache_tools.scales import write_scales
from cache_tools.teacher import Teacher
from cache_tools.writer import SampleColumns, ShardWriter, bind_engine, create_store, write_target

_SOURCE = "synthetic"


def make_store(
    path: Path,
    lengths: Sequence[int],
    *,
    hidden_size: int = 16,
    layer_ids: tuple[int, ...] = (1, 3),
    num_layers: int = 6,
    vocab_size: int = 64,
    chunk_rows: int = 8,
    shard_rows: int | None = None,
    codec: Codec = "bf16",
    tied: bool = True,
    seed: int = 0,
    rejected: Collection[int] = (),
    shards: Collection[int] | None = None,
    teacher: str = "none",
) -> Store:
    """A store of samples with the given lengths (in data order), the target's weights included.

    The first half of each sample is not supervised, the rest is. `rejected` samples get no hidden states; only
    `shards` are written (all by default). Equal arguments give equal bytes.
    """
    if shard_rows is None:
        shard_rows = round_up(max(max(lengths), 4 * chunk_rows), chunk_rows)
    layout = plan_layout(np.asarray(lengths), chunk_rows=chunk_rows, shard_rows=shard_rows)
    manifest = make_manifest(
        layout,
        hidden_size=hidden_size,
        layer_ids=layer_ids,
        num_layers=num_layers,
        vocab_size=vocab_size,
        codec=codec,
        teacher=teacher,
    )
    columns = SampleColumns(np.zeros(len(lengths), dtype=np.int32), layout.order)
    tokens = [sample_tokens(int(length), vocab_size, seed, i) for i, length in enumerate(layout.length)]
    create_store(path, manifest.plan(), layout, columns, tokens, make_files(vocab_size, hidden_size, num_layers))
    bind_engine(path, manifest)
    weights = {"embed_tokens": (vocab_size, hidden_size), "final_norm": (hidden_size,)}
    if not tied:
        weights["lm_head"] = (vocab_size, hidden_size)
    attributes = TargetAttributes(
        tied=tied, norm_eps=1e-5, norm_kind="plain", hidden_size=hidden_size, vocab_size=vocab_size
    )
    rng = np.random.default_rng(seed)
    write_target(path, {name: _random_bits(rng, *shape) for name, shape in weights.items()}, attributes)
    write_scales(path, make_scales(manifest))
    for shard in range(layout.num_shards) if shards is None else shards:
        write_shard(path, manifest, shard, seed=seed, rejected=rejected)
    return Store.open(path)


def write_shard(
    path: Path,
    manifest: Manifest,
    shard: int,
    *,
    seed: int = 0,
    rejected: Collection[int] = (),
    pool: ThreadPoolExecutor | None = None,
) -> None:
    """Writes and seals one shard of a synthetic store."""
    samples = Store.open(path).samples
    with ShardWriter(path, manifest, shard, samples, pool) as writer:
        for sample in writer.samples:
            if sample in rejected:
                writer.reject(sample, manifest.layer_ids[0], "NaN or Inf at token 0")
                continue
            length = int(samples.length[sample])
            states = sample_states(length, manifest.target.hidden_size, len(manifest.layer_ids), seed, sample)
            by_layer = {layer: states[:, i] for i, layer in enumerate(manifest.layer_ids)}
            writer.append(sample, by_layer, sample_teacher(manifest, length, seed, sample))
        writer.seal()


def make_scales(manifest: Manifest) -> dict[int, NDArray[np.float32]]:
    """Channel scales that fit the states; empty for lossless codecs."""
    states = sample_states(256, manifest.target.hidden_size, 1, 0, 0)[:, 0]
    calibration = ChannelCalibration()
    calibration.add(states)
    return {layer_id: calibration.scale() for layer_id in scale_arrays(manifest)}


def sample_teacher(manifest: Manifest, length: int, seed: int, sample: int) -> dict[str, NDArray[Any]]:
    """The teacher's arrays of a synthetic sample, zeros in rows that are not kept."""
    teacher = Teacher.parse(manifest.teacher)
    rng = np.random.default_rng([seed, sample, 2])
    _, mask = sample_tokens(length, manifest.target.vocab_size, seed, sample)
    kept = teacher.rows(mask.astype(np.bool_))[:, None]
    if teacher.kind == "hidden":
        return {"bits": _random_bits(rng, length, manifest.target.hidden_size) * kept}
    if teacher.kind == "topk":
        logits = rng.standard_normal((length, manifest.target.vocab_size), dtype=np.float32)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        ids = np.argsort(-logprobs, axis=1)[:, : teacher.k]
        return {
            "topk_ids": (ids * kept).astype(np.int32),
            "topk_logprobs": np.take_along_axis(logprobs, ids, axis=1).astype(np.float32) * kept,
        }
    return {}


def sample_tokens(length: int, vocab_size: int, seed: int, sample: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Token ids [length] and loss mask [length] of a synthetic sample."""
    rng = np.random.default_rng([seed, sample, 0])
    ids = rng.integers(0, vocab_size, length, dtype=np.int32)
    return ids, (np.arange(length) >= length // 2).astype(np.uint8)


def sample_states(length: int, hidden_size: int, num_layers: int, seed: int, sample: int) -> NDArray[np.uint16]:
    """bfloat16 bit patterns [length, num_layers, hidden_size] of a synthetic sample."""
    return _random_bits(np.random.default_rng([seed, sample, 1]), length, num_layers, hidden_size)


def make_manifest(
    layout: Layout,
    *,
    hidden_size: int,
    layer_ids: tuple[int, ...],
    num_layers: int,
    vocab_size: int,
    codec: Codec,
    teacher: str = "none",
) -> Manifest:
    """The manifest of a synthetic store, bound to an engine."""
    sizes = LayoutSpec(
        num_samples=layout.num_samples,
        num_tokens=layout.num_tokens,
        num_rows=layout.num_rows,
        chunk_rows=layout.chunk_rows,
        shard_rows=layout.shard_rows,
        samples_per_shard=layout.samples_per_shard,
    )
    source = SourceSpec(
        name=_SOURCE,
        sha256=_digest(_SOURCE),
        num_rows=layout.num_samples,
        num_samples=layout.num_samples,
    )
    target = TargetSpec(
        name=_SOURCE,
        model_type="llama",
        config_sha256=_digest("config"),
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        dtype="bfloat16",
        weights_sha256=_digest("weights"),
    )
    return Manifest(
        target=target,
        tokenizer_sha256=_digest("tokenizer"),
        template_sha256=_digest("template"),
        layer_ids=layer_ids,
        codec=codec,
        arithmetic=arithmetic(codec),
        teacher=teacher,
        layout=sizes,
        data=DataSpec(sources=(source,), settings={}, skipped={}),
        engine=EngineSpec(name=_SOURCE, batch_tokens=1024, device="cpu", attention="sdpa", versions={}),
    )


def make_files(vocab_size: int, hidden_size: int = 16, num_layers: int = 6) -> dict[str, bytes]:
    """A tokenizer whose token i reads "wi", and a configuration, as a target's folder would hold them."""
    vocabulary = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    config = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    return {"config.json": json.dumps(config).encode(), "tokenizer.json": json.dumps(tokenizer).encode()}


def _random_bits(rng: np.random.Generator, *shape: int) -> NDArray[np.uint16]:
    return float32_to_bf16_bits(rng.standard_normal(shape, dtype=np.float32))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
