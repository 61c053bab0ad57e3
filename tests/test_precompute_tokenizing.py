"""Which tokens of a conversation are supervised, read back by decoding them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from precompute_cases import (
    CHATML,
    COUNTS_MESSAGES,
    ENDS_TWICE,
    LLAMA2,
    NO_SPECIALS,
    STRIPS_THINKING,
    TAGGED,
    TAGGED_WITH_TAIL,
    VOCAB_SIZE,
    chat,
    make_tokenizer,
)

from cache_tools.errors import TargetError
from precompute.rendering import PROMPT_NOT_A_PREFIX, REWRITES_EARLIER_TURNS, TEMPLATE_REFUSED
from precompute.rows import RowProblem
from precompute.tokenizing import MERGES_AT_BOUNDARY, RowTokenizer, TokenRules, Tokens

TOKENIZERS = {
    template: make_tokenizer(template)
    for template in (
        CHATML,
        TAGGED,
        TAGGED_WITH_TAIL,
        STRIPS_THINKING,
        COUNTS_MESSAGES,
        LLAMA2,
        NO_SPECIALS,
        ENDS_TWICE,
    )
}
CUT_NOT_ASSISTANT = "finish_reason is length but the last message is not the assistant's"
MESSAGE = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), min_size=1, max_size=20)


def row_tokenizer(template: str | None, **changes: Any) -> RowTokenizer:
    rules: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "loss_on": "assistant",
        "max_length": 256,
        "on_long": "truncate",
        "min_supervised": 1,
        "template_args": {},
        **changes,
    }
    tokenizer = TOKENIZERS[template] if template in TOKENIZERS else make_tokenizer(template)
    return RowTokenizer(tokenizer, TokenRules(**rules))


def one(template: str | None, row: dict[str, Any], **changes: Any) -> Tokens:
    (result,) = row_tokenizer(template, **changes).tokenize([row])
    assert isinstance(result, Tokens), result
    return result


def problem(template: str | None, row: dict[str, Any], **changes: Any) -> str:
    (result,) = row_tokenizer(template, **changes).tokenize([row])
    assert isinstance(result, RowProblem), result
    return result.reason


def supervised(template: str, tokens: Tokens) -> list[str]:
    """The text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.loss_mask.astype(np.int8), [0]])))
    runs = edges.reshape(-1, 2)
    return [str(TOKENIZERS[template].decode(tokens.input_ids[a:b])) for a, b in runs]


def text(template: str, tokens: Tokens) -> str:
    return str(TOKENIZERS[template].decode(tokens.input_ids))


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (TAGGED, "<|im_end|>"), (TAGGED_WITH_TAIL, "<|im_end|>"), (NO_SPECIALS, "")],
)
def test_content_and_end_token_of_every_assistant_turn_are_supervised_and_nothing_else(template: str, end: str) -> None:
    tokens = one(template, chat("hi", "hello there", "how?", "good day"))
    assert supervised(template, tokens) == [f"hello there{end}", f"good day{end}"]


def test_text_is_exactly_what_the_template_renders() -> None:
    row = chat("hi", "hello there")
    rendered = TOKENIZERS[CHATML].apply_chat_template(row["messages"], tokenize=False)
    assert text(CHATML, one(CHATML, row)) == rendered
    assert rendered.endswith("<|im_end|>\n")


def test_llama2_style_supervises_up_to_the_end_of_sequence_token() -> None:
    tokens = one(LLAMA2, chat("hi", "hello there", "how?", "good day"))
    assert supervised(LLAMA2, tokens) == [" hello there </s>", " good day </s>"]


def test_only_the_first_of_several_end_tokens_is_supervised() -> None:
    tokens = one(ENDS_TWICE, chat("hi", "hello", "how?", "good day"))
    assert supervised(ENDS_TWICE, tokens) == ["hello<|im_end|>", "good day<|im_end|>"]


def test_tagged_and_prefix_masks_agree() -> None:
    row = chat("hi", "hello\n\nthere\n", "how?", "good day")
    plain, tagged = one(CHATML, row), one(TAGGED, row)
    np.testing.assert_array_equal(plain.input_ids, tagged.input_ids)
    np.testing.assert_array_equal(plain.loss_mask, tagged.loss_mask)


def test_thinking_is_supervised_with_the_answer() -> None:
    row = chat("hi", "hello")
    row["messages"][1]["reasoning_content"] = "a greeting"
    tokens = one(STRIPS_THINKING, row)
    assert supervised(STRIPS_THINKING, tokens) == ["<think>\na greeting\n</think>\n\nhello<|im_end|>"]


@pytest.mark.parametrize("args", [{}, {"enable_thinking": False}])
def test_an_empty_thinking_block_is_not_supervised(args: dict[str, Any]) -> None:
    tokens = one(STRIPS_THINKING, chat("hi", "hello"), template_args=args)
    assert "<think>\n\n</think>\n\nhello" in text(STRIPS_THINKING, tokens)
    assert supervised(STRIPS_THINKING, tokens) == ["hello<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_a_named_row_problem() -> None:
    assert problem(STRIPS_THINKING, chat("hi", "hello", "how?", "good day")) == REWRITES_EARLIER_TURNS


def test_a_template_that_is_never_prefix_stable_is_refused_before_any_row() -> None:
    with pytest.raises(TargetError, match="no sound loss mask") as caught:
        row_tokenizer(COUNTS_MESSAGES).tokenize([chat("hi", "hello")])
    assert PROMPT_NOT_A_PREFIX in str(caught.value)


def test_a_template_that_cannot_be_masked_still_serves_loss_on_all() -> None:
    tokens = one(COUNTS_MESSAGES, chat("hi", "hello"), loss_on="all")
    assert tokens.loss_mask.all()
    assert text(COUNTS_MESSAGES, tokens).startswith("2<|im_start|>")


def test_a_token_that_merges_prompt_and_answer_is_a_named_row_problem() -> None:
    assert problem(CHATML, chat("hi", "\n\nhello")) == MERGES_AT_BOUNDARY
    assert problem(TAGGED, chat("hi", "\n\nhello")) == MERGES_AT_BOUNDARY


@pytest.mark.parametrize(("template", "content"), [(CHATML, "hel"), (TAGGED, "hel"), (LLAMA2, "hel"), (CHATML, "a\n")])
def test_a_cut_answer_has_no_end_token_in_text_or_mask(template: str, content: str) -> None:
    tokens = one(template, chat("hi", content, finish_reason="length"))
    assert text(template, tokens).endswith(content)
    assert supervised(template, tokens)[-1].strip() == content.strip()
    assert tokens.loss_mask[-1] == 1
    complete = one(template, chat("hi", content, finish_reason="stop"))
    assert len(complete.input_ids) > len(tokens.input_ids)


def test_a_cut_answer_loses_its_end_token_under_loss_on_all_too() -> None:
    assert text(CHATML, one(CHATML, chat("hi", "hel", finish_reason="length"), loss_on="all")).endswith("\nhel")


def test_sharegpt_rows_give_the_same_tokens_as_messages() -> None:
    turns = [("system", "be kind"), ("human", "hi"), ("gpt", "hello")]
    sharegpt = {"conversations": [{"from": who, "value": what} for who, what in turns]}
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    messages = {"messages": [{"role": roles[who], "content": what} for who, what in turns]}
    first, second = one(CHATML, sharegpt), one(CHATML, messages)
    np.testing.assert_array_equal(first.input_ids, second.input_ids)
    np.testing.assert_array_equal(first.loss_mask, second.loss_mask)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "system", "content": "x"}]}, "no assistant message in the row"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message in the row"),
        ({"messages": []}, "no messages in the row"),
        ({"messages": "hello"}, "messages is not a list of objects"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "unknown role"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": None}]}, "message without content"),
        (chat("x", 5), "message content is not text"),  # type: ignore[arg-type]
        (chat("x", "bad \ud800"), "text holds broken Unicode"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "conversation starts with an assistant message"),
        (chat("x", "y", "z", finish_reason="length"), CUT_NOT_ASSISTANT),
        ({"prompt": "x"}, "row has none of messages, conversations, text, input_ids"),
        ({"text": "x"}, "plain text has no assistant part (use --loss-on all to supervise every token)"),
        ({"input_ids": [1, 2]}, "input_ids without loss_mask (use --loss-on all to supervise every token)"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask and input_ids differ in length"),
        ({"input_ids": [1, 2], "loss_mask": "01"}, "loss_mask is not a list of integers"),
        ({"input_ids": [1, VOCAB_SIZE], "loss_mask": [0, 1]}, "token id outside the target's vocabulary"),
        ({"input_ids": [1, -1], "loss_mask": [0, 1]}, "token id outside the target's vocabulary"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask holds something other than 0 and 1"),
        ({"input_ids": [1, "2"], "loss_mask": [0, 1]}, "input_ids is not a list of integers"),
        ({"input_ids": [2**80], "loss_mask": [1]}, "input_ids is not a list of integers"),
        ({"input_ids": [], "loss_mask": []}, "too few supervised tokens"),
    ],
)  # fmt: skip
def test_an_unusable_row_has_a_reason(row: dict[str, Any], reason: str) -> None:
    assert problem(CHATML, row) == reason


def test_a_template_error_is_a_row_problem() -> None:
    template = CHATML.replace("{% for", "{% if messages|length > 2 %}{{ raise_exception('no') }}{% endif %}{% for", 1)
    assert problem(template, chat("a", "b", "c", "d")) == TEMPLATE_REFUSED


def test_conversations_without_a_template_are_refused_but_ready_tokens_are_not() -> None:
    ready = {"input_ids": [1, 2, 3], "loss_mask": [False, True, True]}
    tokens = one(None, ready)
    assert tokens.loss_mask.tolist() == [0, 1, 1]
    with pytest.raises(TargetError, match="no chat template"):
        row_tokenizer(None).tokenize([chat("a", "b")])


def test_truncation_keeps_the_first_tokens_and_skips_what_loses_its_supervision() -> None:
    row = chat("hi", "good day to you " * 4)
    full = one(CHATML, row)
    first = int(full.loss_mask.argmax())
    cut = one(CHATML, row, max_length=first + 3)
    np.testing.assert_array_equal(cut.input_ids, full.input_ids[: first + 3])
    assert cut.loss_mask.sum() == 3
    assert problem(CHATML, row, max_length=first + 1, min_supervised=2) == "too few supervised tokens"
    assert problem(CHATML, row, max_length=first + 3, on_long="skip") == "longer than max_length"


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGE, min_size=2, max_size=5), st.sampled_from([CHATML, TAGGED, TAGGED_WITH_TAIL, ENDS_TWICE]))
def test_supervised_text_is_the_answers_for_any_conversation(contents: list[str], template: str) -> None:
    (result,) = row_tokenizer(template).tokenize([chat(*contents)])
    if isinstance(result, RowProblem):
        assert result.reason == MERGES_AT_BOUNDARY
        assert any(answer[0].isspace() for answer in contents[1::2])
        return
    assert supervised(template, result) == [f"{answer}<|im_end|>" for answer in contents[1::2]]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = [chat("hi", "hello"), {"text": "x"}, chat("\n", "good day"), chat("hi", "\n\nno"), chat("a", "b", "c", "d")]
    together = row_tokenizer(CHATML).tokenize(rows)
    for row, result in zip(rows, together, strict=True):
        (alone,) = row_tokenizer(CHATML).tokenize([row])
        if isinstance(alone, RowProblem):
            assert isinstance(result, RowProblem)
            assert result.args == alone.args
        else:
            assert isinstance(result, Tokens)
            np.testing.assert_array_equal(result.input_ids, alone.input_ids)
            np.testing.assert_array_equal(result.loss_mask, alone.loss_mask)
