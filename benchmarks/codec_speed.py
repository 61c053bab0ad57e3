"""How fast quantised codecs encode and decode on one CPU core: `python benchmarks/codec_speed.py`.

Million values per second of this process's CPU time, so that other work on the machine disturbs less.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from cache_tools.quantise import QUANTISED, encode
from precompute.quantise import quantise
from train.dequantise import dequantise

NUM_TOKENS, NUM_LAYERS, HIDDEN = 768, 5, 576
CPU_SECONDS = 1.0


def speed(work: Callable[[], object]) -> float:
    """Million values per CPU second of something that handles all of them once."""
    work()
    count, start = 0, time.process_time()
    while (passed := time.process_time() - start) < CPU_SECONDS:
        work()
        count += 1
    return count * NUM_TOKENS * NUM_LAYERS * HIDDEN / passed / 1e6


def measure(codec: str) -> list[float]:
    """Encode by numpy and by torch, decode by torch to float32 and to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(NUM_TOKENS * NUM_LAYERS, HIDDEN, generator=generator).bfloat16()
    scale = torch.rand(HIDDEN, generator=generator) + 0.5
    bits, by_layer = states.view(torch.int16).numpy().view(np.uint16), scale.expand(NUM_LAYERS, HIDDEN)
    encoded = {
        name: part.reshape(NUM_TOKENS, NUM_LAYERS, *part.shape[1:])
        for name, part in quantise(codec, states, scale).items()
    }
    return [
        speed(lambda: encode(codec, bits, scale.numpy())),
        speed(lambda: quantise(codec, states, scale)),
        speed(lambda: dequantise(codec, encoded, by_layer, dtype=torch.float32)),
        speed(lambda: dequantise(codec, encoded, by_layer, dtype=torch.bfloat16)),
    ]


def main() -> None:
    """Prints the table as Markdown."""
    torch.set_num_threads(1)
    states = torch.randn(NUM_TOKENS, NUM_LAYERS, HIDDEN).bfloat16()
    print(f"plain bfloat16 to float32: {speed(lambda: states.float()):,.0f}\n")
    print(
        "| | encode, numpy reference | encode, torch | decode to float32 | decode to bfloat16 |\n|---|---|---|---|---|"
    )
    for codec in QUANTISED:
        print(f"| {codec} | " + " | ".join(f"{value:,.0f}" for value in measure(codec)) + " |", flush=True)


if __name__ == "__main__":
    main()
