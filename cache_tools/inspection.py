"""What the command `dflash-cache` says about a store and its samples."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cache_tools.arrays import hidden_arrays
from cache_tools.errors import StoreError
from cache_tools.files import Json, reading
from cache_tools.reader import Store
from cache_tools.seals import require_listed

_BF16_BYTES = 2


def describe(store: Store) -> dict[str, Json]:
    """Facts about a store as plain JSON values; sizes in bytes.

    `bytes_per_token` is the size of everything over all tokens. `hidden` counts hidden states of sealed shards only,
    and their `ratio` is how many times smaller they are than plain bfloat16. Raises StoreError when a file of these is
    missing, CorruptError when a list of rejected samples was lost or a seal is damaged.
    """
    manifest = store.manifest
    rejected = store.rejected
    for shard in sorted(store.sealed):
        require_listed(store.path, shard, rejected)
    bytes_on_disk = store.bytes_on_disk()
    num_supervised = int(store.samples.supervised.sum(dtype=np.int64))
    return {
        "format_version": manifest.format_version,
        "target": manifest.target.name,
        "num_samples": store.num_samples,
        "num_tokens": store.num_tokens,
        "num_supervised": num_supervised,
        "layer_ids": list(store.layer_ids),
        "hidden_size": store.hidden_size,
        "codec": manifest.codec,
        "teacher": manifest.teacher,
        "bytes_on_disk": bytes_on_disk,
        "bytes_per_token": bytes_on_disk / store.num_tokens,
        "hidden": _describe_hidden(store),
        "complete": store.complete,
        "shards": {"sealed": len(store.sealed), "total": store.num_shards},
        "target_weights": store.has_target,
        "rejected_samples": len(rejected),
        "skipped_rows": dict(manifest.data.skipped),
        "sources": [source.name for source in manifest.data.sources],
    }


def summary_lines(summary: dict[str, Json]) -> list[str]:
    """The facts of `describe` as aligned lines."""
    names = {name: name.replace("_", " ") for name in summary}
    width = max(map(len, names.values()))
    return [f"{label:<{width}}  {_shown(summary[name])}" for name, label in names.items()]


@dataclass(frozen=True)
class SampleText:
    """A sample, decoded."""

    sample: int
    shard: int
    source: str
    row: int
    num_tokens: int
    num_supervised: int
    content_id: str
    segments: list[tuple[bool, str]]
    """Runs of tokens that are all supervised, or all not: (supervised, text)."""
    note: str
    """Why there are no hidden states; empty if there are."""

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON values."""
        segments: list[Json] = [{"supervised": flag, "text": text} for flag, text in self.segments]
        return {
            "sample": self.sample,
            "shard": self.shard,
            "source": self.source,
            "row": self.row,
            "num_tokens": self.num_tokens,
            "num_supervised": self.num_supervised,
            "content_id": self.content_id,
            "segments": segments,
            "note": self.note,
        }


def read_text(store: Store, sample: int) -> SampleText:
    """Decodes a sample with the target's tokenizer. Raises StoreError when there is no such sample or tokenizer."""
    ids, mask = store.read_tokens(sample)
    shard = store.shard_of(sample)
    rejection = store.rejections.get(sample)
    note = "" if rejection is None else f"rejected: layer {rejection.layer}, {rejection.reason}"
    if shard not in store.sealed:
        note = "hidden states not computed yet"
    table = store.samples
    return SampleText(
        sample=sample,
        shard=shard,
        source=store.manifest.data.sources[int(table.source[sample])].name,
        row=int(table.row[sample]),
        num_tokens=len(ids),
        num_supervised=int(mask.sum()),
        content_id=table.content_id[sample].tobytes().hex(),
        segments=_decode_runs(store, ids, mask),
        note=note,
    )


def _decode_runs(store: Store, ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> list[tuple[bool, str]]:
    """Each run of equal mask, decoded alone: a character that straddles runs shows as U+FFFD."""
    from tokenizers import Tokenizer

    path = store.target_file("tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise StoreError("the target's tokenizer cannot be loaded", where=path, got=error) from error
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    return [
        (bool(mask[first]), tokenizer.decode(ids[first:end].tolist(), skip_special_tokens=False))
        for first, end in pairwise(bounds)
    ]


def _describe_hidden(store: Store) -> dict[str, Json]:
    """Sizes of the hidden states in sealed shards. Raises StoreError when a file of theirs is missing."""
    sealed = np.zeros(store.num_shards, dtype=np.bool_)
    sealed[list(store.sealed)] = True
    is_sealed = sealed[store.samples.start // store.manifest.layout.shard_rows]
    num_tokens = int(store.samples.length[is_sealed].sum(dtype=np.int64))
    arrays = [array for layer_id in store.layer_ids for array in hidden_arrays(store.manifest, layer_id).values()]
    with reading(store.path / "hidden"):
        objects = (store.path / array.object_path(shard) for array in arrays for shard in store.sealed)
        num_bytes = sum(os.stat(path).st_size for path in objects)
    raw = num_tokens * len(store.layer_ids) * store.hidden_size * _BF16_BYTES
    return {
        "tokens": num_tokens,
        "bytes": num_bytes,
        "bytes_per_token": num_bytes / num_tokens if num_tokens else None,
        "ratio": raw / num_bytes if num_tokens else None,
    }


def _shown(value: Json) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{_shown(item)} {name.replace('_', ' ')}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
