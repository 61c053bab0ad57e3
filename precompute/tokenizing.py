"""Rows -> token ids and loss masks, with the target's tokenizer and chat template.

Shapes: L = tokens of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cache_tools.errors import TargetError
from precompute.rendering import ChatRenderer, Rendered
from precompute.rows import Conversation, PlainText, ReadyTokens, RowProblem, parse_row

MERGES_AT_BOUNDARY = "a token crosses the border between prompt and answer"
_PROBES = (
    ({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day to you."}),
    (
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Good day to you.", "reasoning_content": "A greeting."},
    ),
)


@dataclass(frozen=True)
class Tokens:
    """One row, ready to be stored: int32 [L] and uint8 [L] of zeros and ones."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """What decides which tokens of a row are kept and supervised."""

    vocab_size: int
    loss_on: Literal["assistant", "all"]
    max_length: int
    on_long: Literal["truncate", "skip"]
    min_supervised: int
    template_args: dict[str, Any]


class RowTokenizer:
    """Tokenises rows in batches. The result of a row depends on that row alone."""

    def __init__(self, tokenizer: Any, rules: TokenRules) -> None:
        self._tokenizer, self._rules = tokenizer, rules
        self._chat_renderer: ChatRenderer | None = None

    def tokenize(self, rows: Sequence[dict[str, Any]]) -> list[Tokens | RowProblem]:
        """One result per row, in order. Raises TargetError if the template cannot serve any conversation."""
        results: list[Tokens | RowProblem | None] = [None] * len(rows)
        rendered: dict[int, Rendered] = {}
        for index, row in enumerate(rows):
            try:
                parsed = parse_row(row)
                if isinstance(parsed, ReadyTokens):
                    results[index] = self._from_ready(parsed)
                elif isinstance(parsed, PlainText):
                    results[index] = self._from_text(parsed)
                else:
                    rendered[index] = self._render(parsed)
            except RowProblem as problem:
                results[index] = problem
        for index, tokens in zip(rendered, self._encode_rendered(list(rendered.values())), strict=True):
            results[index] = tokens
        return [self._within_limits(result) for result in results if result is not None]

    def _from_ready(self, ready: ReadyTokens) -> Tokens:
        if self._rules.loss_on == "all":
            mask = np.ones(len(ready.input_ids), np.uint8)
        elif ready.loss_mask is None:
            raise RowProblem("input_ids without loss_mask (use --loss-on all to supervise every token)")
        else:
            mask = ready.loss_mask
        self._check_vocabulary(ready.input_ids)
        return Tokens(ready.input_ids.astype(np.int32), mask)

    def _from_text(self, plain: PlainText) -> Tokens:
        if self._rules.loss_on != "all":
            raise RowProblem("plain text has no assistant part (use --loss-on all to supervise every token)")
        encoded = self._tokenizer(plain.text, return_attention_mask=False, verbose=False)["input_ids"]
        ids = np.array(encoded, np.int64)
        self._check_vocabulary(ids)
        return Tokens(ids.astype(np.int32), np.ones(len(ids), np.uint8))

    def _render(self, conversation: Conversation) -> Rendered:
        renderer = self._renderer()
        if self._rules.loss_on == "all":
            return Rendered(renderer.render_text(conversation), [])
        return renderer.render(conversation)

    def _renderer(self) -> ChatRenderer:
        """Made at the first conversation: ready tokens need no template."""
        if self._chat_renderer is None:
            if self._tokenizer.chat_template is None:
                raise TargetError(
                    "the target has no chat template, but the data holds conversations",
                    where=self._tokenizer.name_or_path,
                    fix="add chat_template.jinja to the target's folder, or give text or input_ids rows",
                )
            self._chat_renderer = ChatRenderer(self._tokenizer, self._rules.template_args)
            if self._rules.loss_on == "assistant":
                self._probe(self._chat_renderer)
        return self._chat_renderer

    def _probe(self, renderer: ChatRenderer) -> None:
        """Refuses a template that cannot give a sound loss mask for the simplest conversation there is."""
        problems: list[RowProblem] = []
        for messages in _PROBES:
            try:
                outcome = self._encode_rendered([renderer.render(Conversation([dict(m) for m in messages]))])[0]
            except RowProblem as problem:
                outcome = problem
            if isinstance(outcome, Tokens) and outcome.loss_mask.any():
                return
            problems.append(outcome if isinstance(outcome, RowProblem) else RowProblem("nothing is supervised"))
        raise TargetError(
            "the target's chat template gives no sound loss mask",
            where=self._tokenizer.name_or_path,
            got="; ".join(f"{p.reason} {p.detail}".strip() for p in problems),
            expected="{% generation %} tags, or a rendering that begins with the rendering of the turns before",
            fix="add generation tags to the template, pass --template-args, or supervise all with --loss-on all",
        )

    def _encode_rendered(self, batch: list[Rendered]) -> list[Tokens | RowProblem]:
        """Encodes texts together with their prefixes up to every span border, in one call."""
        texts: list[str] = []
        borders: list[list[int]] = []
        for rendered in batch:
            ends = sorted({c for s in rendered.spans for c in (s.start, s.end)} - {0, len(rendered.text)})
            borders.append(ends)
            texts += [rendered.text, *(rendered.text[:end] for end in ends)]
        encoded = iter(self._encode(texts))
        results: list[Tokens | RowProblem] = []
        for rendered, ends in zip(batch, borders, strict=True):
            ids = next(encoded)
            prefixes = {end: next(encoded) for end in ends}
            try:
                results.append(self._masked(rendered, ids, prefixes))
            except RowProblem as problem:
                results.append(problem)
        return results

    def _encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.array(ids, np.int64) for ids in encoded["input_ids"]]

    def _masked(self, rendered: Rendered, ids: NDArray[np.int64], prefixes: dict[int, NDArray[np.int64]]) -> Tokens:
        self._check_vocabulary(ids)
        if self._rules.loss_on == "all":
            return Tokens(ids.astype(np.int32), np.ones(len(ids), np.uint8))
        token_at = {0: 0, len(rendered.text): len(ids)}
        for border, prefix in prefixes.items():
            if not np.array_equal(ids[: len(prefix)], prefix):
                around = rendered.text[max(border - 12, 0) : border + 12]
                raise RowProblem(MERGES_AT_BOUNDARY, f"around {around!r}")
            token_at[border] = len(prefix)
        mask = np.zeros(len(ids), np.uint8)
        for span in rendered.spans:
            mask[token_at[span.start] : token_at[span.end]] = 1
        return Tokens(ids.astype(np.int32), mask)

    def _check_vocabulary(self, ids: NDArray[np.int64]) -> None:
        if ids.size and (ids.min() < 0 or ids.max() >= self._rules.vocab_size):
            bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise RowProblem("token id outside the target's vocabulary", f"{bad}, vocabulary {self._rules.vocab_size}")

    def _within_limits(self, result: Tokens | RowProblem) -> Tokens | RowProblem:
        if isinstance(result, RowProblem):
            return result
        limit, length = self._rules.max_length, len(result.input_ids)
        if length > limit:
            if self._rules.on_long == "skip":
                return RowProblem("longer than max_length", f"{length} tokens")
            result = Tokens(result.input_ids[:limit], result.loss_mask[:limit])
        supervised = int(result.loss_mask.sum())
        if supervised < self._rules.min_supervised:
            detail = f"{supervised} of {length} tokens" + (", after truncation" if length > limit else "")
            return RowProblem("too few supervised tokens", detail)
        return result
