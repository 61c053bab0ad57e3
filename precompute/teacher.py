"""What is kept of the target's own prediction, made from the output of its last layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.codecs import BF16_INFINITY, BF16_MAGNITUDE
from cache_tools.manifest import Manifest
from cache_tools.reader import Store
from cache_tools.teacher import Teacher
from precompute.target import Target


def kept_layers(manifest: Manifest) -> tuple[int, ...]:
    """The layers whose outputs the target must give: the tapped ones, and the last one if there is a teacher.

    Ascending, so the last layer comes last, also where it is a tap itself.
    """
    last = manifest.target.num_layers - 1
    has_teacher = Teacher.parse(manifest.teacher).kind != "none"
    return manifest.layer_ids if not has_teacher or last in manifest.layer_ids else (*manifest.layer_ids, last)


def teacher_rows(store: Store, target: Target, loss_masks: Sequence[NDArray[np.bool_]], last: Tensor) -> list[Tensor]:
    """The teacher's arrays [N, ...] of a batch in the order of `teacher_arrays`, zeros in rows that are not kept.

    `loss_masks`: [length] of each sample. `last` [N, hidden_size]: output of the target's last layer for all their
    tokens, one after the other.
    """
    teacher = Teacher.parse(store.manifest.teacher)
    if teacher.kind == "none":
        return []
    kept = torch.from_numpy(np.concatenate([teacher.rows(mask) for mask in loss_masks])).to(last.device)
    if teacher.kind == "hidden":
        return [last.masked_fill(~kept[:, None], 0)]
    ids = last.new_zeros((len(last), teacher.k), dtype=torch.int32)
    logprobs = last.new_zeros((len(last), teacher.k), dtype=torch.float32)
    ids[kept], logprobs[kept] = target.top_tokens(last[kept], teacher.k)
    return [ids, logprobs]


def find_bad_teacher(arrays: Mapping[str, NDArray[Any]]) -> str | None:
    """Why the arrays [length, ...] of a sample's teacher, by name, are unusable; None if they are fine."""
    if "bits" in arrays:
        bad = (arrays["bits"] & BF16_MAGNITUDE) >= BF16_INFINITY
    elif "topk_logprobs" in arrays:
        bad = ~np.isfinite(arrays["topk_logprobs"])
    else:
        return None
    return f"NaN or Inf at token {int(bad.any(axis=1).argmax())}" if bad.any() else None


def token_ids(store: Store, samples: Iterable[int]) -> list[NDArray[np.int32]]:
    """Token ids [length] of each sample."""
    return [store.read_tokens(sample)[0] for sample in samples]
