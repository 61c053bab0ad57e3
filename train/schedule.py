"""What changes over the steps of a run."""

from __future__ import annotations

import math


def learning_rate(step: int, *, total: int, peak: float, warmup_ratio: float, min_ratio: float) -> float:
    """Rate of the update that follows `step` finished ones: linear warm-up, then a cosine to `min_ratio * peak`."""
    warmup = round(total * warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(total - warmup, 1)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def cosine(step: int, *, total: int, start: float, end: float) -> float:
    """Goes from `start` at step 0 to `end` at step `total` along half a cosine."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(step / max(total, 1), 1.0)))
