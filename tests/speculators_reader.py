"""Run by the Python of an environment that has the speculators library: what it makes of checkpoints, as files.

python speculators_reader.py logits CHECKPOINT INPUTS OUTPUTS   logits of all blocks, for tensors in INPUTS
python speculators_reader.py convert ZLAB TARGET OUT            the library's own conversion of a z-lab checkpoint
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def logits(checkpoint: str, inputs: str, outputs: str) -> None:
    """INPUTS: features [T, F*H], input_ids [T], anchors [A] ascending, documents [T], positions [T].

    OUTPUTS: logits [A*B, V] in float32, from the code that the library trains with.
    """
    library: Any = importlib.import_module("speculators.models.dflash")
    config = library.DFlashSpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"  # the default compiles its masks
    model = library.DFlashDraftModel.from_pretrained(checkpoint, config=config, dtype=torch.float32).eval()
    given = load_file(inputs)
    anchors = given["anchors"]
    at_anchors = torch.zeros(given["input_ids"].shape[0], dtype=torch.long)
    at_anchors[anchors] = 1
    with torch.no_grad():
        _, found, *_ = model._backbone_forward(
            given["features"][None],
            given["input_ids"][None],
            at_anchors[None],  # the library draws its anchors from these; all of them, when it needs as many
            torch.zeros(1, len(at_anchors), model.hidden_size),
            given["documents"][None],
            position_ids=given["positions"][None],
            max_anchors=len(anchors),
        )
    save_file({"logits": found[0].contiguous()}, outputs)


def convert(zlab: str, target: str, out: str) -> None:
    converter: Any = importlib.import_module("speculators.convert.dflash.converter")
    converter.DFlashConverter().convert(zlab, out, target)


if __name__ == "__main__":
    {"logits": logits, "convert": convert}[sys.argv[1]](*sys.argv[2:])
