"""Progress on standard error: a bar with ETA on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

PLAIN_LINE_SECONDS = 10.0


class Progress:
    """Counts units of work. `update` is cheap enough to call once per batch."""

    def __init__(self, *, total: int | None, unit: str, desc: str, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._total, self._unit, self._desc = total, unit, desc
        self._count, self._note = 0, ""
        self._start = self._last_line = time.monotonic()
        self._bar = (
            tqdm(total=total, unit=unit, desc=desc, file=self._stream, unit_scale=True, dynamic_ncols=True)
            if self._stream.isatty()
            else None
        )

    def update(self, count: int) -> None:
        """Adds `count` finished units."""
        self._count += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._last_line >= PLAIN_LINE_SECONDS:
            self._print_line()

    def set_note(self, text: str) -> None:
        """Shows `text` behind the numbers, for example a rate or a loss."""
        self._note = text
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        """Ends the bar. Off a terminal, prints a last line if the work took long enough to have printed any."""
        if self._bar is not None:
            self._bar.close()
        elif self._last_line > self._start:
            self._print_line()

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        rate = self._count / max(self._last_line - self._start, 1e-9)
        line = f"{self._desc}: {self._count:,}"
        if self._total is not None:
            left = max(self._total - self._count, 0) / rate if rate > 0 else float("inf")
            eta = "?" if left == float("inf") else f"{int(left // 60)}m{int(left % 60):02d}s"
            line += f"/{self._total:,} {self._unit} ({self._count / max(self._total, 1):.0%}) ETA {eta}"
        else:
            line += f" {self._unit}"
        line += f", {rate:,.0f} {self._unit}/s"
        print(f"{line}, {self._note}" if self._note else line, file=self._stream, flush=True)


@contextmanager
def progress_bar(*, total: int | None, unit: str, desc: str, stream: TextIO | None = None) -> Iterator[Progress]:
    """A `Progress` that is closed at the end of the block, also when it ends by an exception."""
    progress = Progress(total=total, unit=unit, desc=desc, stream=stream)
    try:
        yield progress
    finally:
        progress.close()
