"""Which samples of a store a run trains on and how often an epoch holds each, and which ones it is judged by."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from cache_tools.errors import ConfigError
from cache_tools.mixing import mix_sources, parse_weights
from cache_tools.order import Permutation
from cache_tools.reader import Store
from cache_tools.split import split_samples
from train.config import TrainConfig

# Not the run's seed: runs that differ by their seed are to be judged by the same samples.
_SPLIT_SEED = 0


def training_samples(config: TrainConfig, store: Store) -> NDArray[np.int64]:
    """Ascending sample numbers of one epoch, each as often as it comes; empty if every sample was rejected.

    Raises ConfigError for settings that leave nothing, and for weights of sources that the store does not have.
    """
    table = store.samples
    chosen, _ = _split(store, config.validation_share)
    weights = parse_weights(config.source_weights, [source.name for source in store.manifest.data.sources])
    if len(store.rejected) == store.num_samples:
        return np.empty(0, dtype=np.int64)
    chosen = store.without_rejected(chosen)
    if not len(chosen):
        raise ConfigError(
            "every sample is for validation",
            where=store.path,
            got=f"--validation-share {config.validation_share} of {store.num_samples} samples",
            fix="give a smaller share",
        )
    return mix_sources(chosen, table.source[chosen], weights, seed=config.seed)


def supervised_tokens(store: Store, samples: NDArray[np.int64], *, num_tokens: int) -> NDArray[np.int64]:
    """Ascending ids of the tokens, of `num_tokens` in the vocabulary, that carry loss in any of `samples`.

    `samples` ascend. Reads whole shards, since sample by sample a large store takes millions of small reads.
    Raises CorruptError.
    """
    seen = np.zeros(num_tokens, dtype=np.bool_)
    shard_rows = store.manifest.layout.shard_rows
    starts = store.samples.start[samples]
    shards, first_samples = np.unique(starts // shard_rows, return_index=True)
    for shard, chosen in zip(shards.tolist(), np.split(samples, first_samples[1:]), strict=True):
        ids, mask = store.read_shard_tokens(shard)
        begins = store.samples.start[chosen] - shard * shard_rows
        # 1 where a sample begins, -1 behind its end: the running sum is 1 inside of samples.
        borders = np.zeros(len(ids) + 1, dtype=np.int64)
        borders[begins] += 1
        borders[begins + store.samples.length[chosen]] -= 1
        seen[ids[mask & (np.cumsum(borders[:-1]) > 0)]] = True
    return np.flatnonzero(seen)


def validation_samples(store: Store, validation_share: float) -> NDArray[np.int64]:
    """Ascending numbers of the samples with hidden states that runs with this --validation-share do not train on."""
    return store.without_rejected(_split(store, validation_share)[1])


def some_of(samples: NDArray[np.int64], limit: int | None) -> NDArray[np.int64]:
    """At most `limit` of distinct `samples`, ascending; always the same choice for the same samples and limit."""
    if limit is None or len(samples) <= limit:
        return samples
    return np.sort(samples[Permutation(len(samples), seed=_SPLIT_SEED, epoch=0)(np.arange(limit))])


def _split(store: Store, validation_share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    share = Fraction(str(validation_share))
    return split_samples(store.samples.content_id, validation_share=share, seed=_SPLIT_SEED)
