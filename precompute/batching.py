"""Cutting the samples of a shard into batches for the target."""

from __future__ import annotations

from collections.abc import Sequence


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[range]:
    """Runs of neighbouring samples whose padded size, number of samples x longest, is at most `batch_tokens`.

    `lengths`: tokens of each sample. A longer sample runs alone. A batch also ends where less than half of it, or of
    the row that is added, would be real tokens: lengths ascend inside a window of the layout, so the latter is where
    a new window begins. Depends on nothing else, so that a resumed run makes the same batches, and so the same bits.
    """
    batches: list[range] = []
    first = longest = tokens = 0
    for index, length in enumerate(lengths):
        padded = (index - first + 1) * max(longest, length)
        sparse = 2 * (tokens + length) < padded or 2 * length < longest
        if index > first and (padded > batch_tokens or sparse):
            batches.append(range(first, index))
            first, longest, tokens = index, 0, 0
        longest, tokens = max(longest, length), tokens + length
    if first < len(lengths):
        batches.append(range(first, len(lengths)))
    return batches
