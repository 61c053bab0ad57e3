"""What each codec would cost and lose on a target's hidden states, without a store."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cache_tools.codec_report import NUM_SAMPLES, CodecComparison, CodecReport, choose_samples, planned_chunk_rows
from cache_tools.errors import ConfigError, TargetError
from cache_tools.integrity import CONSTANT, find_bad_layer
from cache_tools.progress import progress_bar
from precompute.config import CodecsConfig
from precompute.conversations import find_sources
from precompute.planning import read_target, usable_samples
from precompute.target import Target

# Enough to choose from, and tokenised in a moment.
_NUM_CANDIDATES = 8 * NUM_SAMPLES


def compare_codecs(config: CodecsConfig) -> CodecReport:
    """Runs the target on a fixed choice of the first usable rows. Hidden states of one sample at a time are in memory.

    Raises ConfigError, DataError or TargetError; StoreError when fewer than two samples are usable.
    """
    settings = config.sample_settings(_NUM_CANDIDATES)
    device = _device(config)
    planned = read_target(settings)
    samples = usable_samples(settings, planned, find_sources(config.data)).samples
    calibration, measured = choose_samples(samples.length, np.arange(len(samples)), config.target)
    comparison = CodecComparison(planned.layer_ids, planned.spec.hidden_size, planned_chunk_rows(samples.length))
    target = Target.load(
        config.target, layer_ids=planned.layer_ids, dtype=config.dtype, attention=config.attention, device=device
    )
    with progress_bar(total=len(calibration) + len(measured), unit="samples", desc="codecs") as progress:
        for chosen, take in ((calibration, comparison.calibrate), (measured, comparison.measure)):
            for sample in chosen:
                take(_states(target, samples.tokens(sample)[0]))
                progress.update(1)
    return comparison.report()


def _device(config: CodecsConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device is visible", got="--device cuda", fix="pass --device cpu")
    return torch.device("cuda", 0)


def _states(target: Target, input_ids: NDArray[np.int32]) -> NDArray[np.uint16]:
    """bfloat16 bit patterns [length, F, H] of one sample. Raises TargetError when they are unusable."""
    layers = [layer.cpu().view(torch.int16).numpy().view(np.uint16) for layer in target.hidden_states([input_ids])]
    is_one_token = bool((input_ids == input_ids[0]).all())  # attention then averages equal values
    for number, bits in enumerate(layers):
        reason = find_bad_layer(bits)
        if reason is not None and not (reason == CONSTANT and is_one_token):
            raise TargetError(
                f"the target gave unusable hidden states, tapped layer {number}: {reason}",
                fix="check the target, its precision and attention",
            )
    return np.stack(layers, axis=1)
