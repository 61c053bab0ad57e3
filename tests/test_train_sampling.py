"""Rejection of drafts is lossless: by its algebra, by counting on tables, and through the decoder on a tiny target."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from train.decoding import SpeculativeDecoder, decode_plain
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.evaluate import target_parts
from train.sampling import Drafts, Greedy, Sampling, acceptance, residual

Tokens = tuple[int, ...]


def distributions(size: int) -> st.SearchStrategy[Tensor]:
    """Distributions over `size` tokens in float64, some tokens impossible."""
    weights = st.lists(st.integers(0, 50), min_size=size, max_size=size).filter(any)
    return weights.map(lambda values: torch.tensor(values, dtype=torch.float64) / sum(values))


@settings(deadline=None)
@given(pair=st.integers(1, 8).flatmap(lambda size: st.tuples(distributions(size), distributions(size))))
def test_accepting_or_redrawing_gives_the_targets_distribution(pair: tuple[Tensor, Tensor]) -> None:
    p, q = pair
    kept = q * acceptance(p, q)
    torch.testing.assert_close(kept + (1 - kept.sum()) * residual(p, q), p, atol=1e-12, rtol=0)
    torch.testing.assert_close(kept, torch.minimum(p, q), atol=1e-12, rtol=0)
    assert residual(p, q).sum() == pytest.approx(1.0) and (residual(p, q) >= 0).all()


def test_a_perfect_drafter_loses_nothing_and_an_impossible_one_everything() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    for seed in range(50):
        chooser = Sampling(0.7, seed=seed)
        assert chooser.verify(logits, chooser.draft(logits[:-1]))[0] == 3
        never = torch.full((3, 7), -torch.inf)
        never[:, 2] = 0.0
        without = logits.index_fill(1, torch.tensor([2]), -torch.inf)
        accepted, token = chooser.verify(without, chooser.draft(never))
        assert accepted == 0 and token != 2


def test_greedy_accepts_the_prefix_of_arg_maxima_and_adds_the_next() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 1]), 5).float()
    for drafts, expected in (([3, 1, 4], (3, 1)), ([3, 1, 0], (2, 4)), ([0, 1, 4], (0, 3)), ([3, 0, 4], (1, 1))):
        assert Greedy().verify(logits, Drafts(torch.tensor(drafts))) == expected


def test_low_temperatures_are_greedy_and_seeds_repeat_draws() -> None:
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Sampling(1e-3, seed=5).draft(logits).tokens, logits.argmax(-1))
    draws = [Sampling(1.0, seed=seed).draft(logits).tokens.tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def chi_square(counts: Mapping[Tokens, int], expected: Mapping[Tokens, float], num_draws: int) -> float:
    """p value of Pearson's test; outcomes expected fewer than 5 times are one outcome."""
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-4)
    cells = [(counts.get(key, 0), share * num_draws) for key, share in expected.items() if share * num_draws >= 5]
    assert sum(counts.values()) == num_draws and set(counts) <= set(expected)
    rest = num_draws - sum(count for count, _ in cells), num_draws - sum(mean for _, mean in cells)
    if rest[1] >= 5:
        cells.append(rest)
    assert len(cells) > 10, "too few outcomes to tell anything"
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def enumerate_answers(next_probabilities: Callable[[Tokens], Tensor], size: int, length: int) -> dict[Tokens, float]:
    """The chance of every answer of `length` tokens, by the rule of the product."""
    chances: dict[Tokens, float] = {}
    for answer in itertools.product(range(size), repeat=length):
        chance = 1.0
        for index in range(length):
            chance *= float(next_probabilities(answer[:index])[answer[index]])
        chances[answer] = chance
    return chances


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_answers_from_tables_are_distributed_as_the_tables_say(temperature: float) -> None:
    """Blocks of two drafts; the target's logits for a token depend on all tokens before it."""
    size, length, num_draws = 3, 3, 3000
    generator = torch.Generator().manual_seed(2)
    prefixes = [prefix for n in range(length) for prefix in itertools.product(range(size), repeat=n)]
    table = {prefix: torch.randn(size, generator=generator) for prefix in prefixes}
    draft_logits = torch.randn(2, size, generator=generator)
    chooser = Sampling(temperature, seed=3)

    def answer() -> Tokens:
        drafts = chooser.draft(draft_logits)
        seen = tuple(drafts.tokens.tolist())
        num_accepted, token = chooser.verify(torch.stack([table[seen[:n]] for n in range(3)]), drafts)
        found = (*seen[:num_accepted], token)
        while len(found) < length:
            found = (*found, chooser.pick(table[found]))
        return found

    counts = Counter(answer() for _ in range(num_draws))
    expected, warmer = (
        enumerate_answers(lambda prefix, t=t: (table[prefix] / t).softmax(0), size, length)  # type: ignore[misc]
        for t in (temperature, 1.4 * temperature)
    )
    assert chi_square(counts, expected, num_draws) > 1e-3
    assert chi_square(counts, warmer, num_draws) < 1e-9, "the test must see a temperature that is a little wrong"


@pytest.mark.slow
def test_decoded_answers_are_distributed_as_the_targets_own() -> None:
    size, length, num_draws, temperature = 4, 4, 500, 0.9
    plain: dict[str, Any] = {
        "vocab_size": size, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False,
        "initializer_range": 0.4,
    }  # fmt: skip
    torch.manual_seed(4)
    from_config: Any = AutoModelForCausalLM.from_config
    target = from_config(Qwen3Config(**plain), dtype=torch.float32).eval()
    config = DrafterConfig.for_target(
        Qwen3Config(**plain).to_dict(), num_layers=1, block_size=3, mask_token_id=3, target_layer_ids=(0, 1)
    )
    decoder = SpeculativeDecoder(target, DFlashDrafter(config, seed=1), target_parts(target))
    prompt = torch.tensor([1, 2, 0])

    @torch.no_grad()
    def next_probabilities(prefix: Tokens) -> Tensor:
        ids = torch.cat([prompt, torch.tensor(prefix, dtype=torch.int64)])
        logits: Tensor = target(input_ids=ids[None]).logits[0, -1]
        return (logits.double() / temperature).softmax(0)

    expected = enumerate_answers(cache(next_probabilities), size, length)
    options: dict[str, Any] = {"max_new_tokens": length, "stop_ids": ()}
    found = [decoder.decode(prompt, chooser=Sampling(temperature, seed=seed), **options) for seed in range(num_draws)]
    assert {step for decoded in found for step in decoded.acceptance_lengths} == {1, 2, 3}
    assert chi_square(Counter(tuple(decoded.tokens) for decoded in found), expected, num_draws) > 1e-3
    own = [decode_plain(target, prompt, chooser=Sampling(temperature, seed=seed), **options) for seed in range(300)]
    assert chi_square(Counter(tuple(decoded.tokens) for decoded in own), expected, 300) > 1e-3
