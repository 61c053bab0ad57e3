"""What the loader delivers.

Letters: T = tokens of a pack, F = tapped layers, H = hidden size of the target, D = documents (samples) of a pack,
K = tokens kept of the target's distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from train.tapped import TappedStates


@dataclass(frozen=True)
class TeacherRows:
    """What the target says after each row of a pack, in one of two forms: row t is about the token at t + 1.

    Rows before a token that is not supervised may mean nothing.
    """

    hidden: Tensor | None = None
    """bfloat16 [T, H], output of the target's last layer, before its final norm."""
    topk_ids: Tensor | None = None
    """int32 [T, K], the target's likeliest tokens, each at most once in a row."""
    topk_logprobs: Tensor | None = None
    """float32 [T, K], their log-probabilities under the whole softmax: what is missing to 1 lies outside."""

    def __post_init__(self) -> None:
        assert (self.hidden is None) != (self.topk_ids is None), "one form, not both and not none"
        assert (self.topk_ids is None) == (self.topk_logprobs is None), "top-k needs tokens and log-probabilities"

    @classmethod
    def of_store(cls, arrays: Mapping[str, NDArray[Any]]) -> TeacherRows:
        """From the arrays [T, ...] of `cache_tools.arrays.teacher_arrays`."""
        if "bits" in arrays:
            return cls(hidden=torch.from_numpy(arrays["bits"].view(np.int16)).view(torch.bfloat16))
        return cls(
            topk_ids=torch.from_numpy(arrays["topk_ids"]), topk_logprobs=torch.from_numpy(arrays["topk_logprobs"])
        )

    def to(self, device: torch.device) -> TeacherRows:
        """The same rows on a device; the copy may still be under way."""
        moved = (
            None if tensor is None else tensor.to(device, non_blocking=True)
            for tensor in (self.hidden, self.topk_ids, self.topk_logprobs)
        )
        return TeacherRows(*moved)


@dataclass(frozen=True)
class Pack:
    """Whole samples laid end to end, without padding.

    `tapped` lies in a buffer that is used again: it is valid until the consumer asks for the next step.
    """

    samples: tuple[int, ...]
    cu_seqlens: Tensor  # int32 [D + 1], document boundaries from 0 to T
    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]
    positions: Tensor  # int64 [T], from 0 in every document
    tapped: TappedStates  # layers in the order of layer_ids
    teacher: TeacherRows | None = None


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one optimizer step."""

    step: int
    epoch: float
    """Epochs consumed after this step."""
    packs: list[Pack]
    """This rank's packs; empty when there are more ranks than packs."""
    supervised: int
    """Supervised tokens of the whole step, over all ranks."""
    tokens: int
    """Tokens of the whole step, over all ranks."""
    samples: NDArray[np.int64]
    """Samples of the whole step, over all ranks."""
    unreadable: dict[int, BaseException]
    """Samples of this rank's packs that could not be read, and why: zeros without loss stand in their place."""
    state: dict[str, int | str]
    """Resume with this to continue after this step; ready for JSON."""


@dataclass(frozen=True)
class LoaderStats:
    """Counters since the loader was made, and how full its queues are now."""

    packs_read: int
    read_bytes: int
    """Bytes of hidden states read, as they are handed to the device."""
    wait_seconds: float
    """Time the consumer waited for a step."""
    retries: int
    """Samples that could only be read at the second attempt."""
    q_read: int
    """Samples read and not yet delivered."""
    q_pack: int
    """Packs complete and not yet delivered."""
