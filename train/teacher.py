"""The target as a teacher: which of its rows a slot learns from, and what that row says.

The target's row t holds its opinion on the token at t + 1, so slot k of the block at anchor a, which predicts the token
at a + k, learns from row a + k - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cache_tools.errors import ConfigError, StoreError
from cache_tools.reader import Store
from cache_tools.teacher import Teacher
from train.batches import TeacherRows
from train.config import TrainConfig
from train.loss_rows import SliceTeacher
from train.target_parts import FinalNorm


@dataclass(frozen=True)
class BlockTeacher:
    """The teacher of the slots of blocks."""

    rows: TeacherRows
    """Of the whole pack, on the device of the loss."""
    index: Tensor
    """int64, the row of each slot: [A, B], or [R] after `select`."""
    norm: FinalNorm
    """Of the target; turns its last hidden state into the input of its head."""

    def select(self, slots: Tensor) -> BlockTeacher:
        """Only the slots at flat positions int64 [R]."""
        return BlockTeacher(self.rows, self.index.flatten()[slots], self.norm)

    def of_slice(self, rows: slice, head: Tensor) -> SliceTeacher:
        """What the teacher says in a slice of the selected slots, by the head [V, H]."""
        index = self.index[rows]
        if self.rows.hidden is not None:
            hidden = self.norm(self.rows.hidden[index])
            return SliceTeacher(logits=hidden.to(head.dtype) @ head.T)
        assert self.rows.topk_ids is not None and self.rows.topk_logprobs is not None
        return SliceTeacher(ids=self.rows.topk_ids[index].long(), probabilities=self.rows.topk_logprobs[index].exp())


def block_teacher(rows: TeacherRows, anchors: Tensor, block_size: int, norm: FinalNorm) -> BlockTeacher:
    """The teacher of the blocks at `anchors` int64 [A] of the pack that `rows` belong to.

    Slot 0, and slots past the end of the pack, get a row that exists but means nothing; they carry no loss.
    """
    stored = rows.hidden if rows.hidden is not None else rows.topk_ids
    assert stored is not None
    index = anchors[:, None] + torch.arange(block_size, device=anchors.device) - 1
    return BlockTeacher(rows.to(anchors.device), index.clamp(0, stored.shape[0] - 1), norm)


def require_teacher(config: TrainConfig, store: Store) -> None:
    """Raises StoreError when --kl-weight asks for a teacher that the store does not hold, ConfigError when the head
    cannot follow it."""
    if config.kl_weight == 0:
        return
    kind = Teacher.parse(store.manifest.teacher).kind
    if kind == "none":
        raise StoreError(
            "the store holds nothing of the target's distribution to learn from",
            where=store.path,
            got=f"--kl-weight {config.kl_weight}",
            expected="a store with the target's last hidden state or its top-k tokens",
            fix="precompute one with --teacher hidden or --teacher topk:K, or train with --kl-weight 0",
        )
    if kind == "topk" and config.loss_vocab != "full":
        raise ConfigError(
            "the target's top-k tokens may be missing from a restricted output head",
            got=f"--loss-vocab {config.loss_vocab} --kl-weight {config.kl_weight}",
            fix="use --loss-vocab full",
        )
