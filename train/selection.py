"""Which samples of a store a run trains on, and how often an epoch holds each."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from cache_tools.errors import ConfigError
from cache_tools.mixing import mix_sources, parse_weights
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
    share = Fraction(str(config.validation_share))
    chosen, _ = split_samples(table.content_id, validation_share=share, seed=_SPLIT_SEED)
    weights = parse_weights(config.source_weights, [source.name for source in store.manifest.data.sources])
    if len(store.rejected) == store.num_samples:
        return np.empty(0, dtype=np.int64)
    chosen = chosen[~np.isin(chosen, np.fromiter(store.rejected, np.int64))]
    if not len(chosen):
        raise ConfigError(
            "every sample is for validation",
            where=store.path,
            got=f"--validation-share {config.validation_share} of {store.num_samples} samples",
            fix="give a smaller share",
        )
    return mix_sources(chosen, table.source[chosen], weights, seed=config.seed)
