"""Errors a user can act on. Everything else that escapes is a bug and keeps its traceback."""

from __future__ import annotations


class DflashError(Exception):
    """Something the user can fix: what happened, where, what was found, what was expected, what to do.

    `exit_code` is what the commands exit with: 1 = the work failed, 2 = the command was used wrongly.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.where, self.got, self.expected, self.fix = what, where, got, expected, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        parts = (("where", self.where), ("got", self.got), ("expected", self.expected), ("to fix", self.fix))
        lines += [f"  {label}: {value}" for label, value in parts if value is not None]
        return "\n".join(lines)


class ConfigError(DflashError, ValueError):
    """A flag, a config key or a combination of them is wrong."""

    exit_code = 2


class DataError(DflashError, ValueError):
    """Input rows cannot be used as they are."""


class StoreError(DflashError):
    """A store is missing, incomplete, of another format, or does not fit what it is used with."""


class CorruptError(StoreError):
    """Bytes on disk are not the bytes that were written."""


class TargetError(DflashError):
    """The target model, its tokenizer, its template or its outputs cannot be used."""


class CheckpointError(DflashError):
    """A checkpoint or an exported drafter cannot be used."""
