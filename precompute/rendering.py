"""Conversations through the target's chat template, with the character spans that are the assistant's own.

A span is sound only if the text up to its end is what the target would have seen while it wrote that answer: the
rendering of the conversation so far must be a prefix of the rendering of the whole one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from precompute.rows import Conversation, RowProblem

REWRITES_EARLIER_TURNS = "template rewrites earlier turns"
PROMPT_NOT_A_PREFIX = "template's generation prompt is not a prefix of the answer it renders"
NO_MARKED_TEXT = "template marks no assistant text"
TEMPLATE_REFUSED = "template refused the conversation"

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Either whole, or closing what the generation prompt opened: the template writes it, the target does not.
_EMPTY_THINKING = re.compile(r"\s*(<think>)?\s*</think>\s*")


@dataclass(frozen=True)
class Span:
    """Characters [start, end) are the assistant's content and its end token; the content ends at `content_end`."""

    start: int
    content_end: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the spans to supervise in ascending order."""

    text: str
    spans: list[Span]


class ChatRenderer:
    """Renders with the chat template of `tokenizer` (a transformers tokenizer that has one)."""

    def __init__(self, tokenizer: Any, template_args: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template_args = template_args
        self._template: str = tokenizer.get_chat_template()
        self._special = special_token_texts(tokenizer)
        self.has_generation_tags = _GENERATION_TAG.search(self._template) is not None

    def render(self, conversation: Conversation) -> Rendered:
        """The text and its supervised spans. Raises RowProblem when no sound span can be given.

        The end token of an answer that was cut by a length limit is left out of the text as well.
        """
        if self.has_generation_tags:
            text, spans = self._tagged(conversation)
        else:
            text, spans = self._by_prefixes(conversation)
        if conversation.cut:
            text = self._cut_text(text, spans[-1], conversation.messages[-1]["content"])
            spans = [*spans[:-1], Span(spans[-1].start, len(text), len(text))]
        return Rendered(text, [span for span in spans if span.end > span.start])

    def render_text(self, conversation: Conversation) -> str:
        """The text alone, for when every token is supervised."""
        if conversation.cut:
            return self.render(conversation).text
        return self._render(conversation, len(conversation.messages))[0]

    def _tagged(self, conversation: Conversation) -> tuple[str, list[Span]]:
        text, marked = self._render(conversation, len(conversation.messages), track=True)
        if not marked:
            raise RowProblem(NO_MARKED_TEXT)
        for index in _assistant_turns(conversation)[:-1]:
            partial, partial_marked = self._render(conversation, index + 1, track=True)
            if not partial_marked or not text.startswith(partial[: partial_marked[-1][1]]):
                raise RowProblem(REWRITES_EARLIER_TURNS, f"message {index}")
        return text, [self._trim(text, start, end) for start, end in marked]

    def _by_prefixes(self, conversation: Conversation) -> tuple[str, list[Span]]:
        messages = conversation.messages
        text, _ = self._render(conversation, len(messages))
        spans = []
        for index in _assistant_turns(conversation):
            if index == 0:
                raise RowProblem("conversation starts with an assistant message")
            prompt, _ = self._render(conversation, index, add_generation_prompt=True)
            last = index == len(messages) - 1
            answered = text if last else self._render(conversation, index + 1)[0]
            if not answered.startswith(prompt):
                raise RowProblem(PROMPT_NOT_A_PREFIX, f"message {index}")
            span = self._trim(answered, len(prompt), len(answered))
            if not text.startswith(answered[: span.end]):
                raise RowProblem(REWRITES_EARLIER_TURNS, f"message {index}")
            spans.append(span)
        return text, spans

    def _trim(self, text: str, start: int, end: int) -> Span:
        """Narrows a turn to what the target writes: no empty thinking block before, nothing after the end token."""
        thinking = _EMPTY_THINKING.match(text, start, end)
        if thinking and (thinking[1] or text[:start].rstrip().endswith("<think>")):
            start = thinking.end()
        stop, first_special = end, ""
        while True:
            bare = start + len(text[start:stop].rstrip())
            special = self._special_at_end(text, start, bare)
            if not special:
                break
            stop, first_special = bare - len(special), special
        if first_special:
            return Span(start, stop, stop + len(first_special))
        following = next((s for s in self._special if text.startswith(s, end)), "")
        if following:
            return Span(start, end, end + len(following))
        return Span(start, bare, bare)

    def _special_at_end(self, text: str, start: int, stop: int) -> str:
        if not text.endswith(self._special, start, stop):
            return ""
        return next(s for s in self._special if text.endswith(s, start, stop))

    def _cut_text(self, text: str, span: Span, content: str) -> str:
        cut = text[: span.content_end]
        # Some templates put a space between content and end token; the cut answer never had it.
        return cut if cut.endswith(content) else cut.rstrip()

    def _render(
        self, conversation: Conversation, count: int, *, add_generation_prompt: bool = False, track: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The first `count` messages as text, and with `track` the character spans inside {% generation %} tags."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[conversation.messages[:count]],
                tools=conversation.tools,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=track,
                **{**self._tokenizer.special_tokens_map, **self._template_args},
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise RowProblem(TEMPLATE_REFUSED, f"{type(error).__name__}: {error}") from None
        texts, marked = rendered
        return texts[0], marked[0] if track else []


def special_token_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts of all special tokens, longest first."""
    texts = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(texts | set(map(str, tokenizer.all_special_tokens)), key=lambda t: (-len(t), t)))


def _assistant_turns(conversation: Conversation) -> list[int]:
    return [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
