"""The manifest: everything a store must agree with before anybody computes for it or trains from it."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from cache_tools.codec_names import Codec
from cache_tools.errors import StoreError
from cache_tools.files import RUN_VERIFY, Json, checksum, to_json

FORMAT_VERSION = 1
LAYER_ID_CONVENTION = "output of 0-based decoder layer i, before any later norm"

_T = TypeVar("_T")
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """The model whose hidden states are stored."""

    name: str
    model_type: str
    config_sha256: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: Literal["bfloat16", "float32"]
    """What the target computes in. Hidden states are stored as bfloat16 in both cases."""
    weights_sha256: str | None = None
    """None until the weights have been read for the first time."""


@dataclass(frozen=True, kw_only=True)
class LayoutSpec:
    """Sizes of the row axis."""

    num_samples: int
    num_tokens: int
    num_rows: int
    chunk_rows: int
    shard_rows: int
    samples_per_shard: int
    """Most samples in any shard."""

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.shard_rows)


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """One input file or folder."""

    name: str
    sha256: str
    num_rows: int
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What the samples were made from, and how."""

    sources: tuple[SourceSpec, ...]
    settings: dict[str, Json]
    skipped: dict[str, int]
    """Rows that gave no sample, by reason."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What ran the target."""

    name: str
    batch_tokens: int
    device: str
    attention: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class TargetAttributes:
    """What is needed to use the target's stored weights; attributes of the group `target`."""

    tied: bool
    """The output head is the embedding; then there is no array `lm_head`."""
    norm_eps: float
    norm_kind: Literal["plain", "one_plus_weight"]
    """The final norm multiplies by its weight, or by one plus its weight."""
    hidden_size: int
    vocab_size: int

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON values."""
        return {str(key): value for key, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, value: Json, where: object = None) -> TargetAttributes:
        """The inverse of `to_dict`. Raises StoreError naming the wrong field."""
        return _from_plain(cls, value, "target", where)


@dataclass(frozen=True)
class Difference:
    """One field in which two manifests differ; `field` is a dotted path."""

    field: str
    stored: Json
    now: Json

    def __str__(self) -> str:
        stored, now = _shortened(repr(self.stored), repr(self.now))
        return f"{self.field}: {stored} in the store, {now} now"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Written by planning; `engine` and `target.weights_sha256` are bound once, before the first shard."""

    format_version: int = FORMAT_VERSION
    target: TargetSpec
    tokenizer_sha256: str
    template_sha256: str
    layer_ids: tuple[int, ...]
    layer_id_convention: str = LAYER_ID_CONVENTION
    codec: Codec
    arithmetic: str
    """How a hidden state follows from the stored arrays."""
    teacher: str = "none"
    """What is kept of the target's prediction, in the form that `Teacher.parse` reads."""
    layout: LayoutSpec
    data: DataSpec
    engine: EngineSpec | None = None

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON values."""
        plain = _to_plain(self)
        assert isinstance(plain, dict)
        return plain

    @classmethod
    def from_dict(cls, value: dict[str, Json], where: object = None) -> Manifest:
        """The inverse of `to_dict`. Raises StoreError naming an unknown version, or the wrong field."""
        check_version(value, where)
        return _from_plain(cls, value, "manifest", where)

    def differences(self, now: Manifest) -> list[Difference]:
        """Fields in which `now` differs from this, the stored manifest; of another codec, its name is enough."""
        stored_fields, now_fields = _flat(self.to_dict()), _flat(now.to_dict())
        names = stored_fields.keys() | now_fields.keys()
        if self.codec != now.codec:
            names -= {"arithmetic"}
        return [
            Difference(field, stored_fields.get(field), now_fields.get(field))
            for field in sorted(names)
            if stored_fields.get(field) != now_fields.get(field)
        ]

    def plan(self) -> Manifest:
        """The part that planning fixes: this manifest before it was bound to weights and an engine."""
        return dataclasses.replace(self, engine=None, target=dataclasses.replace(self.target, weights_sha256=None))

    def plan_checksum(self) -> str:
        """Ties seals to the plan they were made for."""
        return checksum(to_json(self.plan().to_dict()))


def check_version(value: dict[str, Json], where: object) -> None:
    """Raises StoreError when a manifest is of a format that this version cannot read."""
    version = value.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise StoreError(
            "unknown format version of the store",
            where=where,
            got=f"format version {version!r}",
            expected=f"format version {FORMAT_VERSION}",
            fix="use the release of dflash-offline that wrote the store, or a newer one",
        )


def _to_plain(value: Any) -> Json:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    assert value is None or isinstance(value, bool | int | float | str), f"not a JSON value: {value!r}"
    return value


def _from_plain(cls: type[_T], value: Json, path: str, where: object) -> _T:
    """A dataclass from plain JSON values; every field must be there and nothing else."""
    if not isinstance(value, dict):
        raise _wrong_field(path, value, "an object", where)
    hints = typing.get_type_hints(cls)
    for name in sorted(hints.keys() - value.keys()):
        raise _wrong_field(f"{path}.{name}", "nothing", "a value", where)
    for name in sorted(value.keys() - hints.keys()):
        raise _wrong_field(f"{path}.{name}", value[name], "no such field in this format version", where)
    return cls(**{name: _checked(hints[name], value[name], f"{path}.{name}", where) for name in hints})


def _checked(annotation: Any, value: Json, path: str, where: object) -> Any:
    """`value` as the annotated type of a manifest field."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is types.UnionType and type(None) in arguments:
        return None if value is None else _checked(arguments[0], value, path, where)
    if dataclasses.is_dataclass(annotation):
        return _from_plain(typing.cast(type[Any], annotation), value, path, where)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_checked(arguments[0], item, f"{path}.{i}", where) for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        if arguments[1] not in (int, str):
            return value
        return {key: _checked(arguments[1], item, f"{path}.{key}", where) for key, item in value.items()}
    if annotation in (int, float, str, bool) and type(value) is annotation:
        return value
    expected = " | ".join(arguments) if origin is Literal else getattr(annotation, "__name__", str(annotation))
    raise _wrong_field(path, value, expected, where)


def _wrong_field(path: str, got: object, expected: str, where: object) -> StoreError:
    return StoreError(
        f"the store's manifest cannot be used: {path}",
        where=where,
        got=repr(got) if got != "nothing" else got,
        expected=expected,
        fix=RUN_VERIFY,
    )


def _shortened(one: str, other: str) -> list[str]:
    """Two different texts, long ones cut down to where they begin to differ."""
    if max(len(one), len(other)) <= _SHOWN_CHARACTERS:
        return [one, other]
    shorter = min(len(one), len(other))
    same = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    first = max(same - _SHOWN_CHARACTERS // 4, 0)
    end = first + _SHOWN_CHARACTERS
    return ["…" * (first > 0) + text[first:end] + "…" * (len(text) > end) for text in (one, other)]


def _flat(value: Json, path: str = "") -> dict[str, Json]:
    """Leaves by dotted path. A list of plain values is one leaf, a list of objects is not."""
    if isinstance(value, dict) and value:
        items: list[tuple[str, Json]] = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = [(str(i), item) for i, item in enumerate(value)]
    else:
        return {path: value}
    leaves: dict[str, Json] = {}
    for key, item in items:
        leaves.update(_flat(item, f"{path}.{key}" if path else key))
    return leaves
