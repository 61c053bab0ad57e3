"""Attention of draft blocks over their context: which rows a slot sees, and three ways to compute it.

Letters: T = context rows of a pack, A = anchors (blocks), B = slots of a block, N = query heads, G = key and
value heads, D = head dimension, W = sliding window.

Who sees what, for slot k of the block at anchor a:
- context row t, if it lies in the anchor's document and t < a. Strictly: when a block is drafted, the target
  has not processed the anchor token yet, so its hidden state does not exist. On sliding layers t >= a + k -
  (W - 1) too;
- slot k' of the same block: every one on full layers, k' <= k on sliding layers;
- nothing of any other block or document.

`attend_per_document` states that with one dense mask per document and is the specification. `attend_two_part`
gives the same numbers without scoring other blocks, `flex_attend` without any dense mask; `attend` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from train.flex import FlexMasks, flex_attend


@dataclass(frozen=True)
class DocumentSpan:
    """The blocks of one document and the context rows that any of them can see (half-open ranges)."""

    first_block: int
    end_block: int
    first_row: int
    end_row: int

    @property
    def blocks(self) -> slice:
        return slice(self.first_block, self.end_block)

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.end_row)


class BlockLayout:
    """Where the blocks of a pack sit. Built once per pack and shared by all draft layers.

    Anchors are ascending pack rows [A]; `cu_seqlens` are the document boundaries, from 0 to T. Positions
    restart at 0 in each document: slot k of a block has the position of the token that it predicts.
    """

    def __init__(self, anchors: Tensor, cu_seqlens: Tensor, block_size: int) -> None:
        device = anchors.device
        boundaries = cu_seqlens.to(device=device, dtype=torch.int64)
        document = torch.searchsorted(boundaries, anchors, right=True) - 1  # [A]
        self.anchors = anchors
        self.block_size = block_size
        self.num_rows = int(boundaries[-1])
        self.starts = boundaries[document]  # [A] first row of the anchor's document
        slots = torch.arange(block_size, device=device)
        self.block_positions = (anchors - self.starts)[:, None] + slots  # [A, B]
        self._boundaries = boundaries
        self._spans: tuple[DocumentSpan, ...] | None = None
        self._biases: dict[tuple[int | None, torch.dtype], list[tuple[Tensor, Tensor | None]]] = {}
        self._flex: FlexMasks | None = None

    @property
    def num_blocks(self) -> int:
        return self.anchors.shape[0]

    def context_positions(self) -> Tensor:
        """[T] position of each context row in its document."""
        rows = torch.arange(self.num_rows, device=self._boundaries.device)
        return rows - self._boundaries[torch.searchsorted(self._boundaries, rows, right=True) - 1]

    @property
    def spans(self) -> tuple[DocumentSpan, ...]:
        """One entry per document that has an anchor, in pack order."""
        if self._spans is None:
            self._spans = tuple(_document_spans(self.anchors.tolist(), self.starts.tolist()))
        return self._spans

    def biases(self, window: int | None, dtype: torch.dtype) -> list[tuple[Tensor, Tensor | None]]:
        """Per span, what to add to scores: of context [blocks, B or 1, rows], of own slots [B, B] or None."""
        key = (window, dtype)
        if key not in self._biases:
            self._biases[key] = [
                (_as_bias(self.context_visible(span, window), dtype), self._slot_bias(window, dtype))
                for span in self.spans
            ]
        return self._biases[key]

    def context_visible(self, span: DocumentSpan, window: int | None) -> Tensor:
        """Bool [blocks of the span, B (1 without a window), rows of the span]."""
        anchors = self.anchors[span.first_block : span.end_block, None, None]
        rows = torch.arange(span.first_row, span.end_row, device=anchors.device)
        visible = rows < anchors
        if window is None:
            return visible
        slots = torch.arange(self.block_size, device=anchors.device)[:, None]
        return visible & (rows >= anchors + slots - (window - 1))

    def slots_visible(self, window: int | None) -> Tensor:
        """Bool [B queries, B keys] inside a block: causal on sliding layers."""
        slots = torch.ones(self.block_size, self.block_size, dtype=torch.bool, device=self.anchors.device)
        return slots if window is None else slots.tril()

    def flex_masks(self) -> FlexMasks:
        """The tile masks of FlexAttention, one per kind of layer, made when first asked for."""
        if self._flex is None:
            self._flex = FlexMasks(self.anchors, self.starts, self.num_rows, self.block_size)
        return self._flex

    def _slot_bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        return None if window is None else _as_bias(self.slots_visible(window), dtype)


def _document_spans(anchors: list[int], starts: list[int]) -> Iterator[DocumentSpan]:
    first = 0
    for block in range(1, len(anchors) + 1):
        if block == len(anchors) or starts[block] != starts[first]:
            yield DocumentSpan(first, block, starts[first], anchors[block - 1])
            first = block


def _as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def attend(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: BlockLayout,
    window: int | None,
) -> Tensor:
    """Attention output [A, B, N, D].

    query [A, B, N, D]; context_key and context_value [T, G, D]; block_key and block_value [A, B, G, D];
    `window` None = full layer, else a sliding layer of that many tokens.
    """
    if query.device.type == "cuda":
        masks = layout.flex_masks()
        return flex_attend(query, context_key, context_value, block_key, block_value, masks, window)
    return attend_two_part(query, context_key, context_value, block_key, block_value, layout, window)


def attend_per_document(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: BlockLayout,
    window: int | None,
) -> Tensor:
    """The specification of `attend`: SDPA with a dense mask over [context; all blocks] of each document."""
    outputs = []
    for span in layout.spans:
        blocks, rows = span.blocks, span.rows
        keys = torch.cat([context_key[rows], block_key[blocks].flatten(0, 1)])
        values = torch.cat([context_value[rows], block_value[blocks].flatten(0, 1)])
        queries = query[blocks].flatten(0, 1)
        output = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=_document_mask(layout, span, window),
            enable_gqa=True,
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).reshape(query.shape)


def _document_mask(layout: BlockLayout, span: DocumentSpan, window: int | None) -> Tensor:
    """Bool [blocks * B, rows + blocks * B] for one document."""
    num_blocks = span.end_block - span.first_block
    context = layout.context_visible(span, window).expand(-1, layout.block_size, -1).flatten(0, 1)
    same_block = torch.eye(num_blocks, dtype=torch.uint8, device=context.device)
    own = torch.kron(same_block, layout.slots_visible(window).to(torch.uint8)).bool()
    return torch.cat([context, own], dim=1)


def attend_two_part(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: BlockLayout,
    window: int | None,
) -> Tensor:
    """`attend` with matrix products: all blocks over their context, each over itself, one softmax.

    Scoring a document's blocks against each other, as one dense product would, costs blocks * B keys a query
    more.
    """
    num_blocks, block_size, num_heads, head_dim = query.shape
    num_kv_heads = block_key.shape[-2]
    groups = num_heads // num_kv_heads
    grouped = (query * head_dim**-0.5).view(num_blocks, block_size, num_kv_heads, groups, head_dim)
    grouped = grouped.permute(2, 0, 1, 3, 4).reshape(num_kv_heads, num_blocks, block_size * groups, head_dim)
    output: Tensor = _TwoPart.apply(  # type: ignore[no-untyped-call]  # torch has no types here
        grouped,
        context_key.transpose(0, 1),
        context_value.transpose(0, 1),
        block_key.permute(2, 0, 1, 3),
        block_value.permute(2, 0, 1, 3),
        layout,
        window,
    )
    output = output.view(num_kv_heads, num_blocks, block_size, groups, head_dim)
    return output.permute(1, 2, 0, 3, 4).reshape(query.shape)


class _TwoPart(torch.autograd.Function):
    """Scaled queries [G, A, S, D] with S = B * groups, keys and values [G, T, D] and [G, A, B, D] -> [G, A, S, D].

    With weights P = softmax(S), output P V and g = d loss / d output: d loss / d S = P * (g V' - rowsum(P * g V')).
    Its backward pass is by hand because autograd would make a gradient of full size for every document's share.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        layout: BlockLayout,
        window: int | None,
    ) -> Tensor:
        output = torch.empty_like(query)
        own_scores = query @ own_key.transpose(-1, -2)  # [G, A, S, B]
        groups = query.shape[2] // layout.block_size
        kept = []
        for span, (context_bias, slot_bias) in zip(layout.spans, layout.biases(window, query.dtype), strict=True):
            blocks, rows = span.blocks, span.rows
            queries = query[:, blocks]
            scores = torch.cat([_over_context(queries, key[:, rows].transpose(1, 2)), own_scores[:, blocks]], dim=-1)
            num_rows = span.end_row - span.first_row
            scores[..., :num_rows] += _per_group(context_bias, groups)
            if slot_bias is not None:
                scores[..., num_rows:] += _per_group(slot_bias, groups)
            weights = scores.softmax(dim=-1)
            mixed = _over_context(weights[..., :num_rows], value[:, rows])
            output[:, blocks] = mixed + weights[..., num_rows:] @ own_value[:, blocks]
            kept.append(weights)
        ctx.save_for_backward(query, key, value, own_key, own_value, *kept)
        ctx.spans = layout.spans
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, *kept = ctx.saved_tensors
        of_query, of_own_key, of_own_value = (torch.empty_like(t) for t in (query, own_key, own_value))
        of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
        for span, weights in zip(ctx.spans, kept, strict=True):
            blocks, rows, num_rows = span.blocks, span.rows, span.end_row - span.first_row
            queries, grad = query[:, blocks], grads[0][:, blocks]
            own = grad @ own_value[:, blocks].transpose(-1, -2)
            of_weights = torch.cat([_over_context(grad, value[:, rows].transpose(1, 2)), own], dim=-1)
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            to_rows, to_own = of_scores[..., :num_rows], of_scores[..., num_rows:]
            of_query[:, blocks] = _over_context(to_rows, key[:, rows]) + to_own @ own_key[:, blocks]
            of_key[:, rows] = to_rows.flatten(1, 2).transpose(1, 2) @ queries.flatten(1, 2)
            of_value[:, rows] = weights[..., :num_rows].flatten(1, 2).transpose(1, 2) @ grad.flatten(1, 2)
            of_own_key[:, blocks] = to_own.transpose(-1, -2) @ queries
            of_own_value[:, blocks] = weights[..., num_rows:].transpose(-1, -2) @ grad
        return of_query, of_key, of_value, of_own_key, of_own_value, None, None


def _over_context(left: Tensor, right: Tensor) -> Tensor:
    """[G, blocks, S, n] @ [G, n, m] -> [G, blocks, S, m] as one product per key head."""
    return (left.flatten(1, 2) @ right).view(*left.shape[:-1], right.shape[-1])


def _per_group(bias: Tensor, groups: int) -> Tensor:
    """Repeat the slot axis (second from last) for the query heads of a key head, or let it broadcast."""
    return bias if bias.shape[-2] == 1 else bias.repeat_interleave(groups, dim=-2)


def attend_cached(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    window: int | None,
) -> Tensor:
    """One block during decoding, its anchor right after the last context row: output [B, N, D].

    query [B, N, D]; context_key and context_value [T, G, D]; block_key and block_value [B, G, D].
    """
    block_size, num_rows = query.shape[0], context_key.shape[0]
    mask = None
    if window is not None:
        first = max(0, num_rows - (window - 1))
        context_key, context_value = context_key[first:], context_value[first:]
        slots = torch.arange(block_size, device=query.device)[:, None]
        keys = torch.arange(first, num_rows + block_size, device=query.device)
        mask = (keys <= num_rows + slots) & (keys >= num_rows + slots - (window - 1))
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        torch.cat([context_key, block_key]).transpose(0, 1)[None],
        torch.cat([context_value, block_value]).transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)
