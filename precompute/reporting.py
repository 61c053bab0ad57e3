"""What a plan amounts to, in numbers, and whether it fits on the disk."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import ArraySpec, hidden_arrays, teacher_arrays
from cache_tools.codec_names import Codec
from cache_tools.errors import StoreError
from cache_tools.layout import padded_rows
from cache_tools.manifest import Manifest
from cache_tools.teacher import Teacher
from precompute.budget import largest_size
from precompute.planning import Plan, Tokenised

# Measured with byte shuffle and zstd: 1.28 (SmolLM2-135M) to 1.40 (Gemma 3), 1.18 for a dozen short samples, whose
# chunks are mostly padding. An estimate, not a promise.
EXPECTED_RATIO = 1.25
SAFETY = 1.15
_EXAMPLES_PER_REASON = 5
_MB = 10**6
_BYTES_PER_VALUE = 2
_BYTES_PER_TOKEN_COLUMNS = 5  # int32 id and uint8 mask
_QUANTILES = {"min": 0, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}


def plan_report(plan: Plan, store: Path | None) -> dict[str, Any]:
    """All numbers of a plan as JSON values; `free_bytes` and `fits` only if it is known where the store goes."""
    manifest, samples = plan.manifest, plan.tokenised.samples
    lengths, supervised = samples.length, int(samples.supervised.sum())
    size = store_size(manifest, lengths, supervised)
    report: dict[str, Any] = {
        "target": manifest.target.name,
        "layer_ids": list(manifest.layer_ids),
        "hidden_size": manifest.target.hidden_size,
        "codec": manifest.codec,
        "teacher": manifest.teacher,
        "samples": manifest.layout.num_samples,
        "tokens": manifest.layout.num_tokens,
        "supervised": supervised,
        "supervised_share": round(supervised / manifest.layout.num_tokens, 6),
        "lengths": {name: int(np.percentile(lengths, q, method="lower")) for name, q in _QUANTILES.items()},
        "duplicates": int(len(samples) - len(np.unique(samples.content_id, axis=0))),
        "shards": manifest.layout.num_shards,
        "chunk_rows": manifest.layout.chunk_rows,
        "padding_share": round(padded_rows(lengths, manifest.layout.chunk_rows) / manifest.layout.num_tokens - 1, 6),
        "bytes_per_token": {
            name: round(size[name] / manifest.layout.num_tokens, 1) for name in ("uncompressed", "expected", "teacher")
        },
        "bytes": size,
        "largest_bytes": largest_size(manifest, lengths, plan.files),
        "sources": [
            {"name": source.name, "rows": source.num_rows, "samples": source.num_samples}
            for source in manifest.data.sources
        ],
        "skipped": manifest.data.skipped,
        "skipped_examples": _skipped_examples(plan.tokenised),
    }
    if store is not None:
        report["free_bytes"] = free_bytes(store)
        report["fits"] = size["needed"] <= report["free_bytes"]
    return report


def store_size(manifest: Manifest, lengths: NDArray[Any], num_supervised: int) -> dict[str, int]:
    """Bytes of a complete store with samples of these lengths, `num_supervised` of their tokens supervised.

    `uncompressed` is what the hidden states take as plain bfloat16, `expected` what they take in the store's codec with
    its padding, `teacher` what is kept of the target's prediction. `needed` is everything, with a margin where it is
    estimated.
    """
    target = manifest.target
    uncompressed = manifest.layout.num_tokens * len(manifest.layer_ids) * target.hidden_size * _BYTES_PER_VALUE
    value_bytes = 4 if target.dtype == "float32" else _BYTES_PER_VALUE
    target_bytes = 2 * target.vocab_size * target.hidden_size * value_bytes  # embedding and head, if not tied
    columns = manifest.layout.num_tokens * _BYTES_PER_TOKEN_COLUMNS
    if manifest.codec == "bf16":
        expected = int(uncompressed / EXPECTED_RATIO)
        hidden_needed = int(expected * SAFETY)
    else:
        expected = hidden_needed = _uncompressed_arrays(manifest, lengths)
    teacher = teacher_needed = _teacher_bytes(manifest, num_supervised)
    if Teacher.parse(manifest.teacher).kind == "hidden":
        teacher_needed = int(teacher * SAFETY)
    return {
        "uncompressed": uncompressed,
        "expected": expected,
        "teacher": teacher,
        "target": target_bytes,
        "needed": hidden_needed + teacher_needed + target_bytes + columns,
    }


def _uncompressed_arrays(manifest: Manifest, lengths: NDArray[Any]) -> int:
    """Hidden states of a codec without compression: whole chunks are written, and quantised first tokens as well."""
    num_rows = padded_rows(lengths, manifest.layout.chunk_rows)
    arrays = hidden_arrays(manifest, manifest.layer_ids[0])
    layer = sum(_row_bytes(array) * (len(lengths) if name == "first" else num_rows) for name, array in arrays.items())
    return layer * len(manifest.layer_ids)


def _teacher_bytes(manifest: Manifest, num_supervised: int) -> int:
    teacher = Teacher.parse(manifest.teacher)
    num_kept = manifest.layout.num_tokens if teacher.everywhere else num_supervised
    uncompressed = num_kept * sum(map(_row_bytes, teacher_arrays(manifest).values()))
    return int(uncompressed / EXPECTED_RATIO) if teacher.kind == "hidden" else uncompressed


def _row_bytes(array: ArraySpec) -> int:
    return np.dtype(array.dtype).itemsize * math.prod(array.shape[1:])


def require_space(store: Path, needed: int, codec: Codec) -> None:
    """Raises StoreError when fewer than `needed` bytes are free where `store` is or will be."""
    free = free_bytes(store)
    if needed <= free:
        return
    basis = "" if codec != "bf16" else f" (estimate: compression {EXPECTED_RATIO}, plus {SAFETY - 1:.0%})"
    smaller = _smaller_plans(free, codec)
    if store.exists():
        fix = f"free space, or move the store to another disk; a smaller one must be planned anew: {smaller}"
    else:
        fix = f"free space, choose another disk with --store, or plan a smaller store: {smaller}"
    raise StoreError(
        "the disk is too small for the store",
        where=store,
        got=f"{readable_bytes(free)} free",
        expected=f"{readable_bytes(needed)} still to be written{basis}",
        fix=fix,
    )


def _smaller_plans(free: int, codec: Codec) -> str:
    """The settings that make a store smaller, the first choice first."""
    lighter = {"bf16": "int8 or int4", "raw": "int8 or int4", "int8": "int4", "fp8": "int4", "int4": ""}[codec]
    ways = [f"--codec {lighter}"] if lighter else []
    ways.append("fewer --layer-ids")
    ways.append(f"--max-bytes {free // _MB}MB for as many samples as fit" if free >= _MB else "fewer samples (--limit)")
    return ", ".join(ways)


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of `path`, which need not exist yet."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def readable_bytes(count: int) -> str:
    """Bytes for people: 1,234,567 -> "1.2 MB"."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1000:,.1f} kB"


def _skipped_examples(tokenised: Tokenised) -> dict[str, list[str]]:
    """The first few skipped rows of each reason."""
    examples: dict[str, list[str]] = {}
    for row in tokenised.skipped:
        shown = examples.setdefault(row.reason, [])
        if len(shown) < _EXAMPLES_PER_REASON:
            name = f"{row.where} (id {row.row_id})" if row.row_id is not None else row.where
            shown.append(f"{name}: {row.detail}" if row.detail else name)
    return examples
