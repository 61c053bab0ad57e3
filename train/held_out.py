"""Samples to judge a drafter by, read from a store into packs that are walked or scored at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from cache_tools.errors import StoreError
from cache_tools.reader import Store
from train.batches import Pack

# Tokens of a pack. Many answers side by side make the matrix products large; 0.8 GB of features for a 27B target.
PACK_TOKENS = 16384


def group_samples(store: Store, samples: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Cuts distinct samples into packs of at most `PACK_TOKENS` tokens (or one sample), those with most to walk first.

    Answers of similar length end in the same round, so rounds stay full. The grouping depends on the samples alone.
    """
    table = store.samples
    ordered = samples[np.lexsort((samples, -table.supervised[samples].astype(np.int64)))]
    groups: list[list[int]] = []
    tokens = PACK_TOKENS
    for sample, length in zip(ordered.tolist(), table.length[ordered].tolist(), strict=True):
        if tokens + length > PACK_TOKENS:
            groups.append([])
            tokens = 0
        groups[-1].append(sample)
        tokens += length
    return [np.asarray(group, dtype=np.int64) for group in groups]


def read_packs(
    store: Store, groups: Sequence[NDArray[np.int64]], layer_ids: Sequence[int], *, skip_unreadable: bool = False
) -> Iterator[Pack]:
    """The packs of `groups` in order, the next one read while this one is in use.

    With `skip_unreadable`, samples that cannot be read are left out of their pack, which may then be empty.
    Raises StoreError for them otherwise, and for a layer that is not stored.
    """
    with ThreadPoolExecutor(max_workers=1) as reader:
        ahead: Future[Pack] | None = None
        for index in range(len(groups) + 1):
            ready = ahead
            if index < len(groups):
                ahead = reader.submit(_read_pack, store, groups[index], layer_ids, skip_unreadable)
            if ready is not None:
                yield ready.result()


def _read_pack(store: Store, samples: NDArray[np.int64], layer_ids: Sequence[int], skip_unreadable: bool) -> Pack:
    read = []
    for sample in samples.tolist():
        try:
            read.append((sample, *store.read_tokens(sample), store.read_hidden(sample, layer_ids)))
        except (StoreError, OSError):
            if not skip_unreadable:
                raise
    lengths = np.asarray([len(ids) for _, ids, _, _ in read], dtype=np.int64)
    width = len(layer_ids) * store.hidden_size
    ids = np.concatenate([np.empty(0, np.int32), *(ids for _, ids, _, _ in read)])
    mask = np.concatenate([np.empty(0, np.bool_), *(mask for _, _, mask, _ in read)])
    bits = np.concatenate([np.empty((0, width), np.uint16), *(states.reshape(-1, width) for *_, states in read)])
    positions = np.concatenate([np.empty(0, np.int64), *(np.arange(length) for length in lengths)])
    return Pack(
        samples=tuple(sample for sample, *_ in read),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        input_ids=torch.from_numpy(ids.astype(np.int64)),
        loss_mask=torch.from_numpy(mask),
        positions=torch.from_numpy(positions),
        features=torch.from_numpy(bits).view(torch.bfloat16),
    )
