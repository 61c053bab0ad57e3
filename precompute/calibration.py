"""The static channel scales of a quantised store: found once, on samples from all over it, before the first shard."""

from __future__ import annotations

import time

import numpy as np
import torch

from cache_tools.arrays import scale_arrays
from cache_tools.errors import TargetError
from cache_tools.order import Permutation
from cache_tools.quantise import ChannelCalibration
from cache_tools.reader import Store
from cache_tools.scales import write_scales
from cache_tools.seals import SCALES_SEAL
from precompute.target import Target
from precompute.teacher import token_ids

# A root mean square over so many tokens is known to a percent, and a scale needs less.
_NUM_SAMPLES = 256
_NUM_TOKENS = 65536
_POLL_SECONDS = 0.2


def calibrate(store: Store, target: Target) -> None:
    """Measures every channel and seals the scales, unless that was done before. Nothing to do for lossless codecs.

    Which samples are used depends on the store's plan alone. Raises TargetError, StoreError.
    """
    if not scale_arrays(store.manifest) or (store.path / SCALES_SEAL).exists():
        return
    found: dict[int, ChannelCalibration] = {}
    samples = calibration_samples(store)
    for sample in samples:
        # One by one: samples of different lengths would be mostly padding.
        layers = target.hidden_states(token_ids(store, [sample]))
        for layer_id, hidden in zip(store.layer_ids, layers, strict=False):  # behind the taps may come the last layer
            if torch.isfinite(hidden).all():  # what is not is found, and named, when its shard is computed
                found.setdefault(layer_id, ChannelCalibration()).add(
                    hidden[1:].cpu().view(torch.int16).numpy().view(np.uint16)
                )
    for layer_id in store.layer_ids:
        if layer_id not in found:
            raise TargetError(
                f"the target gave unusable hidden states for all samples to calibrate on, layer {layer_id}",
                where=store.path,
                got=f"NaN or Inf in each of {len(samples)} samples",
                fix="check the target, its precision and attention",
            )
    write_scales(store.path, {layer_id: calibration.scale() for layer_id, calibration in found.items()})


def calibration_samples(store: Store) -> list[int]:
    """A fixed choice of samples from all over the store, at most _NUM_SAMPLES, that hold about _NUM_TOKENS."""
    count = min(_NUM_SAMPLES, store.num_samples)
    chosen = Permutation(store.num_samples, seed=0, epoch=0)(np.arange(count))
    before = np.cumsum(store.samples.length[chosen]) - store.samples.length[chosen]
    return [int(sample) for sample in chosen[before < _NUM_TOKENS]]


def await_scales(store: Store) -> None:
    """Waits until another worker has sealed the scales. The parent ends us if that one fails."""
    while scale_arrays(store.manifest) and not (store.path / SCALES_SEAL).exists():
        time.sleep(_POLL_SECONDS)
