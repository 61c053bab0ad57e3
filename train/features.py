"""Context features on their way into the drafter: one fixed scale per channel, and keyed noise.

Hidden states have a few channels tens of times larger than the rest, and deeper layers are larger than early ones.
Without a scale `fc` mostly sees those. The scale is a constant of the run and is folded into `fc` at export, so an
exported drafter is a plain DFlash drafter that reads unscaled hidden states.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.codecs import bf16_to_float32
from cache_tools.errors import StoreError
from cache_tools.order import Permutation, mix64
from cache_tools.reader import Store

NUM_CALIBRATION_SAMPLES = 64


def channel_rms(
    store: Store, layer_ids: Sequence[int], samples: NDArray[np.int64], *, skip_unreadable: bool = False
) -> Tensor:
    """Root mean square of every tapped channel, float32 [F, H], over a fixed choice of `samples`.

    The first token of each sample is left out: it is an attention sink with a norm 40-160 times the others'.
    With `skip_unreadable`, what cannot be read does not count.
    Raises StoreError when there is no sample, none has a second token, or a layer is zero in all of them.
    """
    if len(samples) == 0:
        raise StoreError(
            "no sample is left to train on",
            where=store.path,
            got=f"{len(store.rejected)} of {store.num_samples} samples rejected",
            fix="see why with `dflash-cache info`; precompute again with a sound target",
        )
    chosen = samples[Permutation(len(samples), seed=0, epoch=0)(np.arange(min(NUM_CALIBRATION_SAMPLES, len(samples))))]
    total = np.zeros((len(layer_ids), store.hidden_size), np.float64)
    count = 0
    for sample in chosen.tolist():
        try:
            states = bf16_to_float32(store.read_hidden(sample, layer_ids))[1:]
        except (StoreError, OSError):
            if not skip_unreadable:
                raise
            continue
        total += np.square(states, dtype=np.float64).sum(axis=0)
        count += len(states)
    if count == 0:
        raise StoreError("the samples are too short to calibrate", where=store.path, expected="two tokens or more")
    rms = np.sqrt(total / count)
    silent = [layer for layer, row in zip(layer_ids, rms, strict=True) if not row.any()]
    if silent:
        raise StoreError("a tapped layer is zero everywhere", where=store.path, got=f"layers {silent}")
    # A channel that never fires would get an infinite scale; the smallest one that does is a safe stand-in.
    smallest = np.where(rms > 0, rms, np.inf).min(axis=1, keepdims=True)
    return torch.from_numpy(np.maximum(rms, smallest).astype(np.float32))


def add_noise(
    features: Tensor,
    cu_seqlens: Tensor,
    samples: Sequence[int],
    *,
    scale: float,
    unit: Tensor,
    seed: int,
    step: int,
) -> Tensor:
    """Adds Gaussian noise of standard deviation `scale * unit` to scaled features [T, F*H].

    `unit` [F*H] is the RMS of the scaled features of each layer. The noise of a sample is keyed by
    (seed, step, sample): the pack or rank it sits in, and a resumption, change nothing.
    """
    noisy = features.clone()
    bounds = cu_seqlens.tolist()
    generator = torch.Generator(device=features.device)
    for sample, (first, end) in zip(samples, itertools.pairwise(bounds), strict=True):
        generator.manual_seed(mix64(seed, step, sample) >> 1)  # torch takes 63 bits
        noise = torch.randn(
            (end - first, features.shape[1]), generator=generator, device=features.device, dtype=torch.float32
        )
        noisy[first:end] += (noise * unit * scale).to(features.dtype)
    return noisy
