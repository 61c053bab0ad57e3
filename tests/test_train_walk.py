"""A walk along a stored answer does what speculative decoding does, wherever the answer lies in a pack."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train_decoding import (
    BLOCK_SIZE,
    COMMON,
    HIDDEN,
    MASK,
    TAPS,
    VOCAB,
    features_of,
    parts_of,
    plain,
    prompt_of,
    tiny_target,
    trained,
)  # fmt: skip
from torch import Tensor
from transformers import Qwen3Config

from train import walk
from train.acceptance import Acceptance
from train.batches import Pack
from train.decoding import SpeculativeDecoder
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.walk import answer_spans, walk_answers


def pack_of(documents: list[tuple[Tensor, Tensor, Tensor]]) -> Pack:
    """A pack of (tokens [n], loss mask [n], features [n, F * H])."""
    lengths = [len(tokens) for tokens, _, _ in documents]
    tokens, masks, features = (torch.cat(parts) for parts in zip(*documents, strict=True))
    return Pack(
        samples=tuple(range(len(documents))),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        input_ids=tokens,
        loss_mask=masks.bool(),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        features=features,
    )


def walked(drafter: DFlashDrafter, pack: Pack, embedding: Tensor, lm_head: Tensor, **more: Any) -> list[Acceptance]:
    return walk_answers(drafter, pack.features, pack, embed=lambda tokens: embedding[tokens], lm_head=lm_head, **more)


@settings(deadline=None)
@given(
    documents=st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=5),
    limit=st.none() | st.integers(1, 6),
)
def test_answers_are_unbroken_supervised_rows_of_one_document(documents: list[list[bool]], limit: int | None) -> None:
    mask = np.asarray([value for document in documents for value in document])
    cu_seqlens = np.cumsum([0, *map(len, documents)])
    found = answer_spans(mask, cu_seqlens, max_new_tokens=limit)
    expected: list[tuple[int, int, bool]] = []
    for begin, document in zip(cu_seqlens.tolist(), documents, strict=False):
        row = 0
        while row < len(document):
            if not document[row]:
                row += 1
                continue
            length = 1
            while row + length < len(document) and document[row + length]:
                length += 1
            kept = length if limit is None else min(length, limit)
            expected.append((begin + row, begin + row + kept - 1, kept < length))
            row += length
    assert list(zip(found.first.tolist(), found.last.tolist(), found.cut.tolist(), strict=True)) == expected


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("ends", ["at a stop token", "at the limit"])
def test_along_greedy_answers_it_equals_speculative_decoding(kind: str, ends: str) -> None:
    """Every step and every count, for several answers in one pack: drafters that are right now and then."""
    target, drafter = tiny_target(kind), copy.deepcopy(trained(kind))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.03)
    parts, documents, expected = parts_of(target), [], []
    for length in (9, 4, 9, 13, 6):
        prompt, limit = prompt_of(length), 41
        answer = plain(target, prompt, limit).tokens
        stop_ids: tuple[int, ...] = ()
        if ends == "at a stop token":
            last = next(i for i in range(20, 41) if answer[i] not in answer[:i] or i == 40)
            stop_ids, answer, limit = (answer[last],), answer[: answer.index(answer[last]) + 1], 60
        decoder = SpeculativeDecoder(target, drafter, parts)
        found = decoder.decode(prompt, max_new_tokens=limit, stop_ids=stop_ids)
        assert found.tokens == answer
        expected.append(found)
        # Stored answers go on behind a limit that decoding has.
        tokens = torch.cat([prompt, torch.tensor(answer if stop_ids else plain(target, prompt, 50).tokens)])
        documents.append((tokens, torch.arange(len(tokens)) >= length, features_of(target, tokens)))
    more = {} if ends == "at a stop token" else {"max_new_tokens": 41}
    found_walks = walked(drafter, pack_of(documents), parts.embedding, parts.lm_head, **more)
    names = ("acceptance_lengths", "proposed_at", "reached_at", "accepted_at")
    for one, other in zip(found_walks, expected, strict=True):
        assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
    assert len({step for one in found_walks for step in one.acceptance_lengths}) > 2, "needs partly accepted blocks"


@pytest.mark.parametrize("layer_types", [("full_attention",) * 2, ("sliding_attention", "full_attention")])
def test_any_stored_answers_are_walked_as_one_block_after_another(layer_types: tuple[str, ...]) -> None:
    """Against blocks drafted one by one from a cache, for documents with several answers."""
    config = DrafterConfig.for_target(
        Qwen3Config(**COMMON).to_dict(), num_layers=2, block_size=BLOCK_SIZE, mask_token_id=MASK, target_layer_ids=TAPS,
        layer_types=layer_types, sliding_window=6 if "sliding_attention" in layer_types else None,
    )  # fmt: skip
    drafter = DFlashDrafter(config)
    generator = torch.Generator().manual_seed(7)
    # A head of few tokens, so that an untrained drafter is right now and then.
    embedding, lm_head = (torch.randn(n, HIDDEN, generator=generator) for n in (VOCAB, 3))
    documents = []
    for length in (30, 1, 17, 2, 24):
        tokens = torch.randint(3, (length,), generator=generator)
        features = torch.randn(length, len(TAPS) * HIDDEN, generator=generator)
        documents.append((tokens, torch.rand(length, generator=generator) < 0.85, features))
    found = walked(drafter, pack_of(documents), embedding, lm_head)
    expected = [steps for document in documents for steps in one_by_one(drafter, *document, embedding, lm_head)]
    assert [answer.acceptance_lengths for answer in found] == expected
    assert {step for steps in expected for step in steps} >= {1, 2, 3}


@torch.no_grad()
def one_by_one(
    drafter: DFlashDrafter, tokens: Tensor, mask: Tensor, features: Tensor, embedding: Tensor, lm_head: Tensor
) -> list[list[int]]:
    spans = answer_spans(mask.numpy(), np.asarray([0, len(tokens)]))
    answers = []
    for anchor, last in zip(spans.first.tolist(), spans.last.tolist(), strict=True):
        steps = []
        while anchor < last:
            block = torch.full((BLOCK_SIZE,), MASK)
            block[0] = tokens[anchor]
            cache = drafter.new_cache()
            drafter.extend(cache, features[:anchor])
            drafts = (drafter.draft_block(embedding[block], cache)[1:] @ lm_head.T).argmax(-1)
            gained = 1
            while gained < BLOCK_SIZE and anchor + gained < last and drafts[gained - 1] == tokens[anchor + gained]:
                gained += 1
            steps.append(gained)
            anchor += gained
        answers.append(steps)
    return answers


@pytest.mark.parametrize("slice_elements", [1, 1 << 28])
def test_slots_are_judged_only_up_to_the_first_wrong_one_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, slice_elements: int
) -> None:
    monkeypatch.setattr(walk, "_SLICE_ELEMENTS", slice_elements)
    generator = torch.Generator().manual_seed(8)
    hidden, lm_head = torch.randn(50, 5, 8, generator=generator), torch.randn(3, 8, generator=generator)
    labels, num_drafts = torch.randint(3, (50, 5), generator=generator), torch.randint(6, (50,), generator=generator)
    right = ((hidden @ lm_head.T).argmax(-1) == labels) & (torch.arange(5) < num_drafts[:, None])
    expected = right.long().cumprod(1).sum(1)
    assert torch.equal(walk._accepted(hidden, labels, num_drafts, lm_head), expected)
    assert expected.max() > 2


def test_one_token_answers_have_no_step_and_a_pack_without_answers_gives_none() -> None:
    drafter, target = trained("dense"), tiny_target("dense")
    parts, tokens = parts_of(target), prompt_of(5)
    document = (tokens, torch.arange(5) == 4, features_of(target, tokens))
    found = walked(drafter, pack_of([document]), parts.embedding, parts.lm_head)
    assert [answer.acceptance_lengths for answer in found] == [[]]
    silent = (tokens, torch.zeros(5), features_of(target, tokens))
    assert walked(drafter, pack_of([silent]), parts.embedding, parts.lm_head) == []
