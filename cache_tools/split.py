"""Train and validation samples, told apart by what they contain."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_tools.errors import ConfigError
from cache_tools.order import mix64_array

_SPLIT_KEY: Final = 0x73706C6974  # separates the split from every other use of the same seed


def split_samples(
    content_ids: NDArray[np.uint8], *, validation_share: Fraction | float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the training and of the validation samples, ascending; together all, each in one of them.

    A keyed hash of the content id decides, so samples of equal content are on the same side, and neither the order of
    rows nor what else is in the store matters. With a larger share, validation only gains samples.

    Args:
        content_ids: [n, 16] bytes.
        validation_share: expected part of the distinct contents that is for validation, in [0, 1).

    Raises:
        ConfigError: the share is out of range.
    """
    assert content_ids.dtype == np.uint8 and content_ids.ndim == 2 and content_ids.shape[1] == 16
    if not 0 <= validation_share < 1:
        raise ConfigError(
            "The share of validation samples is out of range.", got=validation_share, expected="at least 0, below 1"
        )
    words = np.ascontiguousarray(content_ids).view("<u8")
    threshold = int(Fraction(validation_share) * (1 << 64))
    for_validation = mix64_array(_SPLIT_KEY, seed, words[:, 0], words[:, 1]) < np.uint64(threshold)
    return np.flatnonzero(~for_validation), np.flatnonzero(for_validation)
