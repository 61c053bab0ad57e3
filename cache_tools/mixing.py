"""Several sources with weights: how often an epoch holds each sample, before it is shuffled."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_tools.errors import ConfigError
from cache_tools.order import mix64_array

Ints = NDArray[np.int64]

_MIX_KEY: Final = 0x6D6978  # separates the choice of samples from every other use of the same seed
_MAX_WEIGHT: Final = 1000


def parse_weights(settings: Sequence[str], sources: Sequence[str]) -> list[Fraction]:
    """The weight of each source, from settings such as "chat.jsonl=0.25" or "code=1/3"; 1 where none is given.

    Decimals and fractions are taken exactly.

    Raises:
        ConfigError: a setting of another form, an unknown or repeated source, or a weight out of range.
    """
    weights: dict[str, Fraction] = {}
    for setting in settings:
        name, equals, text = setting.rpartition("=")
        if name not in sources:
            close = difflib.get_close_matches(name, sources, n=1)
            raise ConfigError(
                "A weight is for no source of this store.",
                got=setting,
                expected=f"NAME=WEIGHT with a NAME among {', '.join(sources)}",
                fix=f"did you mean {close[0]}?" if close else None,
            )
        if name in weights:
            raise ConfigError("A source has two weights.", got=name, fix="keep one of them")
        try:
            weights[name] = Fraction(text.strip())
        except (ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                "A weight is not a number.", got=f"{name}{equals}{text}", expected="for example 2, 0.25 or 1/3"
            ) from error
        if not 0 <= weights[name] <= _MAX_WEIGHT:
            raise ConfigError("A weight is out of range.", got=setting, expected=f"0 to {_MAX_WEIGHT}")
    return [weights.get(name, Fraction(1)) for name in sources]


def mix_sources(
    samples: NDArray[np.integer], source: NDArray[np.integer], weights: Sequence[Fraction], *, seed: int
) -> Ints:
    """Sample numbers of one epoch, ascending, each as often as it comes: the index space that is then shuffled.

    A source of n samples and weight w contributes floor(w * n): every sample floor(w) times, and a subset, chosen by
    a keyed hash, once more. The subset is the same in every epoch, and a larger weight only adds to it.

    Args:
        samples: numbers to choose from, each once.
        source: index of the source of each of them, of the same shape.
        weights: one per source, >= 0.

    Raises:
        ConfigError: nothing is left.
    """
    assert samples.shape == source.shape
    chosen = [np.empty(0, dtype=np.int64)]
    for index, weight in enumerate(weights):
        members = samples[source == index].astype(np.int64)
        whole = int(weight)
        num_extra = int((weight - whole) * len(members))
        by_hash = np.argsort(mix64_array(_MIX_KEY, seed, members), kind="stable")
        chosen += [np.repeat(members, whole), members[by_hash[:num_extra]]]
    mixed = np.sort(np.concatenate(chosen))
    if not len(mixed):
        raise ConfigError(
            "The weights of the sources leave nothing to train on.",
            got=", ".join(map(str, weights)),
            fix="give some source a larger weight",
        )
    return mixed
