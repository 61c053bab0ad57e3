"""The manifest: plain JSON there and back, and refusals that name the field."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any, get_args

import numpy as np
import pytest

from cache_tools.codec_names import Codec
from cache_tools.errors import StoreError
from cache_tools.layout import plan_layout
from cache_tools.manifest import Difference, Manifest, TargetAttributes
from cache_tools.quantise import arithmetic
from cache_tools.synthetic import make_manifest


@pytest.fixture
def manifest() -> Manifest:
    layout = plan_layout(np.array([3, 9]), chunk_rows=4, shard_rows=16)
    made = make_manifest(layout, hidden_size=8, layer_ids=(1, 4), num_layers=6, vocab_size=32, codec="bf16")
    settings: dict[str, Any] = {"max_length": 9, "on_long": "skip", "nested": {"a": [1, None, 0.5, True]}}
    data = dataclasses.replace(made.data, settings=settings, skipped={"empty": 3})
    return dataclasses.replace(made, data=data)


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all fields, without free-form ones."""
    if not isinstance(value, dict) or path[-1:] in (("settings",), ("versions",), ("skipped",)):
        return [path]
    return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]


def parent_of(plain: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path[:-1]:
        plain = plain[key]
    return plain


def test_manifest_survives_the_way_through_json(manifest: Manifest) -> None:
    for made in (manifest, manifest.plan()):
        plain = json.loads(json.dumps(made.to_dict()))
        assert Manifest.from_dict(plain) == made
        assert Manifest.from_dict(plain).to_dict() == made.to_dict()


def test_every_missing_field_is_named(manifest: Manifest) -> None:
    for path in leaves(manifest.to_dict()):
        plain = copy.deepcopy(manifest.to_dict())
        del parent_of(plain, path)[path[-1]]
        expected = "format version None" if path == ("format_version",) else ".".join(path)
        with pytest.raises(StoreError, match=expected):
            Manifest.from_dict(plain)


def test_every_field_of_a_wrong_type_is_named(manifest: Manifest) -> None:
    for path in leaves(manifest.to_dict()):
        plain = copy.deepcopy(manifest.to_dict())
        parent_of(plain, path)[path[-1]] = [["wrong"]]
        expected = "format version" if path == ("format_version",) else ".".join(path)
        with pytest.raises(StoreError, match=expected):
            Manifest.from_dict(plain)


def test_an_unknown_field_is_named(manifest: Manifest) -> None:
    plain = manifest.to_dict()
    plain["colour"] = "red"
    with pytest.raises(StoreError, match=r"manifest\.colour"):
        Manifest.from_dict(plain)


def test_an_unknown_version_says_which_and_what_to_do(manifest: Manifest) -> None:
    with pytest.raises(StoreError, match="format version 7") as caught:
        Manifest.from_dict({**manifest.to_dict(), "format_version": 7, "new_field": 1}, "some/store")
    assert "format version 1" in str(caught.value)
    assert "some/store" in str(caught.value)
    assert "release" in str(caught.value)


def test_differences_name_each_field_by_its_dotted_path(manifest: Manifest) -> None:
    assert manifest.differences(manifest) == []
    source = dataclasses.replace(manifest.data.sources[0], sha256="other")
    now = dataclasses.replace(
        manifest,
        layer_ids=(1, 5),
        target=dataclasses.replace(manifest.target, hidden_size=16),
        data=dataclasses.replace(manifest.data, sources=(source,), settings={"max_length": 10}),
    )
    found = {item.field: (item.stored, item.now) for item in manifest.differences(now)}
    assert found == {
        "layer_ids": ([1, 4], [1, 5]),
        "target.hidden_size": (8, 16),
        "data.sources.0.sha256": (manifest.data.sources[0].sha256, "other"),
        "data.settings.max_length": (9, 10),
        "data.settings.on_long": ("skip", None),
        "data.settings.nested.a": ([1, None, 0.5, True], None),
    }


def test_another_codec_is_one_difference_and_its_arithmetic_none(manifest: Manifest) -> None:
    made = {
        codec: dataclasses.replace(manifest, codec=codec, arithmetic=arithmetic(codec)) for codec in get_args(Codec)
    }
    for stored in made.values():
        for now in made.values():
            shown = [f"codec: {stored.codec!r} in the store, {now.codec!r} now"] if stored is not now else []
            assert list(map(str, stored.differences(now))) == shown


def test_long_values_are_shown_where_they_begin_to_differ(manifest: Manifest) -> None:
    other = manifest.tokenizer_sha256[:30] + "x" * 34
    now = dataclasses.replace(manifest, tokenizer_sha256=other, arithmetic=manifest.arithmetic + " * 2" * 50)
    assert {item.field for item in manifest.differences(now)} == {"tokenizer_sha256", "arithmetic"}
    for item in manifest.differences(now):
        stored, shown = str(item).removeprefix(f"{item.field}: ").removesuffix(" now").split(" in the store, ")
        assert stored != shown and max(len(stored), len(shown)) <= 42
        assert stored.strip("…") in repr(item.stored) and shown.strip("…") in repr(item.now)
    assert str(Difference("layer_ids", [1, 2], [1, 3])) == "layer_ids: [1, 2] in the store, [1, 3] now"


def test_the_plan_is_the_same_before_and_after_binding(manifest: Manifest) -> None:
    assert manifest.plan() != manifest
    assert manifest.plan().plan() == manifest.plan()
    assert manifest.plan().plan_checksum() == manifest.plan_checksum()
    other = dataclasses.replace(manifest, codec="raw")
    assert other.plan_checksum() != manifest.plan_checksum()


def test_target_attributes_survive_the_way_through_json() -> None:
    made = TargetAttributes(tied=False, norm_eps=1e-6, norm_kind="one_plus_weight", hidden_size=8, vocab_size=9)
    assert TargetAttributes.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    with pytest.raises(StoreError, match=r"target\.norm_kind"):
        TargetAttributes.from_dict({**made.to_dict(), "norm_kind": "odd"})
