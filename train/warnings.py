"""What a person should know before hours of training: settings that work but are most likely not meant."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cache_tools.order import Permutation
from cache_tools.reader import Store
from train.config import TrainConfig

NUM_SCANNED_SAMPLES = 1000


def warnings(config: TrainConfig, store: Store, samples: NDArray[np.int64], steps_per_epoch: float) -> Iterator[str]:
    """One line each. `samples` are those trained on; scans the tokens of at most `NUM_SCANNED_SAMPLES` of them."""
    chosen = samples[Permutation(len(samples), seed=0, epoch=0)(np.arange(min(NUM_SCANNED_SAMPLES, len(samples))))]
    count = sum(int((store.read_tokens(sample)[0] == config.mask_token_id).sum()) for sample in chosen.tolist())
    if count:
        yield (
            f"warning: the mask token {config.mask_token_id} occurs {count:,} times in {len(chosen):,} samples; "
            "choose --mask-token-id among tokens that no conversation contains"
        )
    if steps_per_epoch < 1:
        yield (
            f"warning: one step covers {1 / steps_per_epoch:.1f} passes over the data; lower --packs-per-step or "
            "--token-budget"
        )
