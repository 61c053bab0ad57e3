"""What four bits can do: the error of ways to quantise hidden states to about 4.25 bits, on a store's own states.

`python benchmarks/int4_schemes.py STORE`, a lossless store. Channel scales come from some samples, errors from others,
first tokens are left out. Errors are relative L2, averaged over layers: `raw` as it is, `by channel` in units of each
channel's root mean square, which is what a drafter reads whose features are scaled per channel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache_tools.codec_report import choose_samples, usable_samples
from cache_tools.codecs import bf16_to_float32
from cache_tools.quantise import E4M3FN, ChannelCalibration, float32_to_e4m3fn
from cache_tools.reader import Store

Values = NDArray[np.float32]
Scheme = Callable[[Values], Values]
"""Rows [N, H], divided by their channel scales, to what is decoded."""

SYMMETRIC = np.arange(-7, 8, dtype=np.float32) / np.float32(7)
UNIFORM = np.arange(-8, 8, dtype=np.float32) / np.float32(8)
FLOAT4 = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32) / np.float32(6)
# Quantiles of a normal distribution, scaled to -1 to 1 (Dettmers et al. 2023, QLoRA, appendix E).
_BELOW = (-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0)
_ABOVE = (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1)
NORMAL_FLOAT = np.array((*_BELOW, *_ABOVE), np.float32)
SEARCH = tuple(np.linspace(0.6, 1.1, 11))
MAX_ROWS = 2500


@dataclass(frozen=True)
class Groups:
    """Groups of channels with one scale each: the factor on the group's largest magnitude with the least error."""

    book: Values
    size: int = 32
    factors: Sequence[float] = SEARCH
    signed: bool = True
    """The sign of the scale gives the book's lowest entry, -1, to the largest magnitude whatever its sign."""
    stored: str = "exact"
    """How group scales are stored: exact, linear (127 steps up to the token's largest), or e4m3."""

    def __call__(self, rows: Values) -> Values:
        groups = rows.reshape(len(rows), -1, self.size)
        largest = np.abs(groups).max(axis=2)
        sign = np.where(self.signed & (groups.max(axis=2) > -groups.min(axis=2)), -1, 1).astype(np.float32)
        best = np.full(largest.shape, np.inf, np.float32)
        decoded = np.zeros_like(groups)
        middles = (self.book[1:] + self.book[:-1]) / 2
        for scale in self._scales(largest):
            wide = (np.maximum(scale, np.float32(1e-30)) * sign)[:, :, None]
            tried = self.book[np.searchsorted(middles, groups / wide)] * wide
            error = np.square(tried - groups).sum(axis=2)
            decoded = np.where((error < best)[:, :, None], tried, decoded)
            best = np.minimum(error, best)
        return decoded.reshape(rows.shape)

    def _scales(self, largest: Values) -> list[Values]:
        token = largest.max(axis=1, keepdims=True)
        if self.stored == "e4m3":
            code = float32_to_e4m3fn(largest / token * np.float32(256)).astype(np.int64)
            return [E4M3FN[np.clip(code + step, 1, 126)] * token / np.float32(256) for step in (1, 0, -1, -2)]
        scales = [largest * np.float32(factor) for factor in self.factors]
        if self.stored == "linear":
            step = token / np.float32(120)
            scales = [np.clip(np.rint(scale / step), 1, 127) * step for scale in scales]
        return scales


def hadamard(size: int) -> Values:
    """Orthogonal [size, size], a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(np.sqrt(size))


def rotated(scheme: Scheme, size: int) -> Scheme:
    """The scheme after random signs and a Hadamard rotation of neighbouring blocks of channels."""
    matrix = hadamard(size)

    def apply(rows: Values) -> Values:
        signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), rows.shape[1])
        turned = ((rows * signs).reshape(-1, size) @ matrix).reshape(rows.shape)
        back: Values = (scheme(turned).reshape(-1, size) @ matrix.T).reshape(rows.shape) * signs
        return back

    return apply


def keeping_outliers(scheme: Scheme, count: int) -> Scheme:
    """The scheme with the `count` channels of the heaviest tails kept; chosen on the measured rows, so a bound."""

    def apply(rows: Values) -> Values:
        tails = np.square(np.square(rows)).mean(axis=0) / np.square(np.square(rows).mean(axis=0))
        kept = np.argsort(tails)[-count:]
        inner = rows.copy()
        inner[:, kept] = 0
        decoded = scheme(inner)
        decoded[:, kept] = rows[:, kept]
        return decoded

    return apply


def schemes(hidden_size: int) -> dict[str, tuple[float, float, Scheme]]:
    """By description: bits per value (token scales left out), exponent of the channel scale, and the scheme."""
    found: dict[str, tuple[float, float, Scheme]] = {}
    for size in (16, 32, 64):
        bits = 4 + 8 / size
        found[f"groups of {size}, -7 to 7, largest"] = (bits, 1, Groups(SYMMETRIC, size, (1,), signed=False))
        found[f"groups of {size}, -7 to 7, search"] = (bits, 1, Groups(SYMMETRIC, size, signed=False))
        found[f"groups of {size}, -8 to 7, signed scale, largest"] = (bits, 1, Groups(UNIFORM, size, (1,)))
        found[f"groups of {size}, -8 to 7, signed scale, search"] = (bits, 1, Groups(UNIFORM, size))
        found[f"groups of {size}, normal float, signed scale, search"] = (bits, 1, Groups(NORMAL_FLOAT, size))
    base, chosen = Groups(UNIFORM), Groups(UNIFORM, stored="e4m3")
    found["groups of 32, fp4 (e2m1), search"] = (4.25, 1, Groups(FLOAT4, signed=False))
    found["groups of 32, -8 to 7, signed linear 8-bit scale, search"] = (4.25, 1, Groups(UNIFORM, stored="linear"))
    found["**groups of 32, -8 to 7, signed e4m3 scale, best of 4**"] = (4.25, 1, chosen)
    for size in (32, 64):
        found[f"groups of 32, search, rotated by {size}"] = (4.25, 1, rotated(base, size))
    found["groups of 32, normal float, search, rotated by 64"] = (4.25, 1, rotated(Groups(NORMAL_FLOAT), 64))
    found["groups of 32, search, no channel scale"] = (4.25, 0, base)
    found["groups of 32, search, rotated by 64, no channel scale"] = (4.25, 0, rotated(base, 64))
    for exponent in (0.75, 0.9):
        found[f"chosen, channel scale = rms^{exponent}"] = (4.25, exponent, chosen)
    for count in (4, 16):
        found[f"chosen, {count} channels kept exactly"] = (
            4.25 + 12 * count / hidden_size,
            1,
            keeping_outliers(chosen, count),
        )
    return found


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    store = Store.open(parser.parse_args().store)
    calibration, measured = choose_samples(store.samples.length, usable_samples(store), store.path)
    known = np.concatenate([store.read_hidden(sample)[1:] for sample in calibration])
    rows = np.concatenate([store.read_hidden(sample)[1:] for sample in measured])
    rows = rows[np.random.default_rng(0).permutation(len(rows))[:MAX_ROWS]]
    rms = []
    for layer in range(len(store.layer_ids)):
        channels = ChannelCalibration()
        channels.add(known[:, layer])
        rms.append(channels.scale())
    print("| scheme | bits | raw | by channel | worst channel |\n|---|---|---|---|---|")
    for name, (bits, exponent, scheme) in schemes(store.hidden_size).items():
        raw, scaled, worst = [], [], 0.0
        for layer, size in enumerate(rms):
            true = bf16_to_float32(np.ascontiguousarray(rows[:, layer]))
            scale = size ** np.float32(exponent)
            error = scheme(true / scale) * scale - true
            raw.append(np.linalg.norm(error) / np.linalg.norm(true))
            scaled.append(np.linalg.norm(error / size) / np.linalg.norm(true / size))
            worst = max(worst, float((np.linalg.norm(error, axis=0) / np.linalg.norm(true, axis=0)).max()))
        print(f"| {name} | {bits:.3g} | {np.mean(raw):.2%} | {np.mean(scaled):.2%} | {worst:.1%} |", flush=True)


if __name__ == "__main__":
    main()
