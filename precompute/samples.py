"""Samples as they come out of tokenisation, in data order, without a Python object per token.

Shapes: n = samples, L = tokens of one sample.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from cache_tools.codecs import content_id
from precompute.tokenizing import Tokens

_BLOCK_TOKENS = 2**22
_CONTENT_ID_BYTES = 16


class SampleBuffer:
    """Grows by one sample at a time; 5 bytes per token and about 40 per sample. A sample lies in one block."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.uint8]] = []
        self._used = 0  # tokens in the last block
        self._block, self._offset, self._row = array("i"), array("q"), array("q")
        self._length, self._supervised, self._source = array("i"), array("i"), array("i")
        self._content_ids = bytearray()

    def __len__(self) -> int:
        return len(self._length)

    def add(self, tokens: Tokens, *, source: int, row: int) -> None:
        """Appends one sample; `source` and `row` say where it came from."""
        length = len(tokens.input_ids)
        if not self._ids or self._used + length > len(self._ids[-1]):
            self._ids.append(np.empty(max(_BLOCK_TOKENS, length), np.int32))
            self._masks.append(np.empty(max(_BLOCK_TOKENS, length), np.uint8))
            self._used = 0
        part = slice(self._used, self._used + length)
        self._ids[-1][part], self._masks[-1][part] = tokens.input_ids, tokens.loss_mask
        self._block.append(len(self._ids) - 1)
        self._offset.append(self._used)
        self._used += length
        self._length.append(length)
        self._supervised.append(int(tokens.loss_mask.sum()))
        self._source.append(source)
        self._row.append(row)
        self._content_ids += content_id(tokens.input_ids, tokens.loss_mask)

    def select(self, indices: NDArray[np.int64]) -> SampleBuffer:
        """Only these samples, in this order; the tokens are shared, not copied."""
        chosen = SampleBuffer()
        chosen._ids, chosen._masks, chosen._used = self._ids, self._masks, self._used
        for name in ("_block", "_offset", "_row", "_length", "_supervised", "_source"):
            column: array[int] = getattr(self, name)
            setattr(chosen, name, array(column.typecode, np.asarray(column)[indices].tobytes()))
        chosen._content_ids = bytearray(self.content_id[indices].tobytes())
        return chosen

    def tokens(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids and loss mask, [L] each, of one sample; views, not copies."""
        part = slice(self._offset[index], self._offset[index] + self._length[index])
        return self._ids[self._block[index]][part], self._masks[self._block[index]][part]

    @property
    def length(self) -> NDArray[np.int64]:
        """[n] tokens of each sample."""
        return np.array(self._length, np.int64)

    @property
    def supervised(self) -> NDArray[np.int32]:
        """[n] supervised tokens of each sample."""
        return np.array(self._supervised, np.int32)

    @property
    def source(self) -> NDArray[np.int32]:
        """[n] index of the source of each sample."""
        return np.array(self._source, np.int32)

    @property
    def row(self) -> NDArray[np.int64]:
        """[n] 0-based row number in the source of each sample."""
        return np.array(self._row, np.int64)

    @property
    def content_id(self) -> NDArray[np.uint8]:
        """[n, 16] hash of token ids and loss mask of each sample."""
        return np.frombuffer(bytes(self._content_ids), np.uint8).reshape(-1, _CONTENT_ID_BYTES)
