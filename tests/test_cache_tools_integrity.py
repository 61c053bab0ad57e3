"""`verify` finds every kind of damage to every file, names it, and never fails itself."""

from __future__ import annotations

import binascii
import io
import json
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache_tools.errors import DflashError, StoreError
from cache_tools.integrity import Finding, find_bad_layer, num_bytes_to_verify, spot_check, verify
from cache_tools.progress import Progress
from cache_tools.reader import Store
from cache_tools.synthetic import make_store, sample_states, write_shard
from cache_tools.writer import ShardWriter

LENGTHS = [5, 17, 30, 8, 9, 31, 2, 12]
SHARD_ROWS = 64
REJECTED = 1


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("integrity") / "s.zarr"
    return make_store(path, LENGTHS, shard_rows=SHARD_ROWS, rejected=(REJECTED,), tied=False).path


@pytest.fixture
def path(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "s.zarr"))


def all_files(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def named(findings: list[Finding], name: str) -> list[Finding]:
    return [finding for finding in findings if finding.object == name]


def chunk_of_sample(path: Path, array: str, shard: int, row: int, chunk_rows: int) -> tuple[int, int]:
    """Offset and size of the chunk of a shard that holds a row, by the sharding specification."""
    content = (path / array / "c" / str(shard) / "0").read_bytes()
    index = np.frombuffer(content[-(16 * (SHARD_ROWS // chunk_rows) + 4) : -4], dtype="<u8").reshape(-1, 2)
    offset, size = index[row % SHARD_ROWS // chunk_rows].tolist()
    return offset, size


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def test_an_undamaged_store_has_no_findings_and_the_progress_reaches_its_size(path: Path) -> None:
    class Counter(Progress):
        count = 0

        def update(self, count: int) -> None:
            self.count += count

    counter = Counter(total=None, unit="B", desc="verify", stream=io.StringIO())
    assert verify(path, counter) == []
    assert counter.count == num_bytes_to_verify(path) == sum(os.stat(path / name).st_size for name in all_files(path))
    assert verify(make_store(path.parent / "half", LENGTHS, shards=(1,)).path) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_in_any_file_is_found_and_the_file_named(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for name in all_files(path):
        content = (path / name).read_bytes()
        places = [0, len(content) - 1, rng.randrange(len(content))]
        flip(path / name, places[seed], rng.randrange(8))
        assert {item.kind for item in named(verify(path), name)} == {"corrupt"}, name
        (path / name).write_bytes(content)
    assert verify(path) == []


def test_every_bit_of_manifest_and_seal_is_protected(path: Path) -> None:
    for name in ("zarr.json", "sealed/0.json"):
        content = (path / name).read_bytes()
        for offset in range(0, len(content), 7):
            flip(path / name, offset, offset % 8)
            assert named(verify(path), name), f"{name}: byte {offset}"
            (path / name).write_bytes(content)


def test_a_truncated_or_lengthened_file_is_found_and_named(path: Path) -> None:
    for name in all_files(path):
        content = (path / name).read_bytes()
        for changed in (content[:-1], content[: len(content) // 2], b"", content + b"\0"):
            (path / name).write_bytes(changed)
            assert named(verify(path), name), name
        (path / name).write_bytes(content)


def test_a_missing_file_is_found_and_the_file_or_what_it_sealed_is_named(path: Path) -> None:
    for name in all_files(path):
        content = (path / name).read_bytes()
        (path / name).unlink()
        findings = verify(path)
        if name.startswith("sealed/") and name != "sealed/plan.json":
            # Without its seal a shard is just not complete; that its files are there gives it away.
            assert findings, name
            assert {item.kind for item in findings} == {"unsealed"}
            if name == "sealed/0.json":
                unsealed = ["hidden/1/bits/c/0/0", "hidden/3/bits/c/0/0", "rejected/0.json"]
                assert [item.object for item in findings] == unsealed
        else:
            assert [item.kind for item in named(findings, name)] == ["missing"], name
        (path / name).write_bytes(content)


def test_foreign_files_and_half_written_ones_are_named(path: Path) -> None:
    foreign = ["notes.txt", "hidden/1/bits/c/99/0", "hidden/7/bits/c/0/0", "sealed/00.json", "tokens/c/0", "target/x/y"]
    half = ["sealed/.tmp-77-3.json", "hidden/1/bits/c/1/.tmp-77-0", ".tmp-77-zarr.json"]
    for name in foreign + half:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")
    findings = verify(path)
    assert {(item.kind, item.object) for item in findings} == {
        *(("foreign", name) for name in foreign),
        *(("temporary", name) for name in half),
    }


def test_links_to_nothing_are_foreign_and_do_not_disturb_sizes(path: Path) -> None:
    size = Store.open(path).bytes_on_disk()
    (path / "nowhere").symlink_to(path / "gone")
    (path / "hidden/loop").symlink_to("loop")
    assert {(item.kind, item.object) for item in verify(path)} == {("foreign", "nowhere"), ("foreign", "hidden/loop")}
    assert num_bytes_to_verify(path) == Store.open(path).bytes_on_disk() == size


def test_a_shard_that_is_being_written_is_said_to_be_so(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", LENGTHS, shards=(0,))
    with ShardWriter(store.path, store.manifest, 1, store.samples) as writer:
        assert {item.kind for item in verify(store.path)} == {"temporary"}
        for sample in writer.samples:
            states = sample_states(int(store.samples.length[sample]), 16, 2, 0, sample)
            writer.append(sample, {1: states[:, 0], 3: states[:, 1]})
    assert verify(store.path) == []


@pytest.mark.parametrize("layer", [1, 3])
def test_damage_in_a_chunk_names_exactly_the_sample_it_belongs_to(path: Path, layer: int) -> None:
    store = Store.open(path)
    chunk_rows = store.manifest.layout.chunk_rows
    for sample in sorted(set(range(store.num_samples)) - {REJECTED}):
        shard, start, length = (
            store.shard_of(sample),
            int(store.samples.start[sample]),
            int(store.samples.length[sample]),
        )
        name = f"hidden/{layer}/bits/c/{shard}/0"
        content = (path / name).read_bytes()
        offset, size = chunk_of_sample(path, f"hidden/{layer}/bits", shard, start + length - 1, chunk_rows)
        flip(path / name, offset + size // 2, 5)
        (finding,) = verify(path)
        assert (finding.object, finding.shard, finding.samples) == (name, shard, (sample, sample))
        (path / name).write_bytes(content)


def test_damage_in_two_places_gives_two_runs_of_samples_and_a_damaged_index_all_of_the_shard(path: Path) -> None:
    store = Store.open(path)
    chunk_rows = store.manifest.layout.chunk_rows
    samples = store.shard_samples(0)
    assert len(samples) >= 4
    name = "hidden/1/bits/c/0/0"
    content = (path / name).read_bytes()
    for sample in (samples[0], samples[2], samples[3]):
        offset, _ = chunk_of_sample(path, "hidden/1/bits", 0, int(store.samples.start[sample]), chunk_rows)
        flip(path / name, offset)
    assert [item.samples for item in verify(path)] == [(samples[0], samples[0]), (samples[2], samples[3])]
    (path / name).write_bytes(content)
    flip(path / name, len(content) - 9)
    (finding,) = verify(path)
    assert finding.samples == (samples[0], samples[-1])
    assert str(finding).startswith(f"corrupt: {name}, shard 0, samples {samples[0]} to {samples[-1]}: ")


def test_damaged_tokens_and_table_entries_name_samples_too(path: Path) -> None:
    store = Store.open(path)
    flip(path / "tokens/loss_mask/c/1", 2)
    (finding,) = verify(path)
    assert finding.shard == 1
    assert finding.samples is not None
    first, last = finding.samples
    assert store.shard_samples(1).start == first <= last < store.shard_samples(1).stop
    flip(path / "tokens/loss_mask/c/1", 2)
    flip(path / "samples/content_id/c/0/0", 2)
    (finding,) = verify(path)
    assert finding.samples == (0, store.num_samples - 1)
    flip(path / "samples/start/c/0", 2)
    assert {item.object for item in verify(path)} == {"samples/content_id/c/0/0", "samples/start/c/0"}


def test_seals_of_another_plan_or_another_shard_are_found(path: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", LENGTHS, shard_rows=SHARD_ROWS, codec="raw", rejected=(REJECTED,))
    content = (path / "sealed/1.json").read_bytes()
    shutil.copy(other.path / "sealed/1.json", path / "sealed/1.json")
    assert [item.kind for item in named(verify(path), "sealed/1.json")] == ["wrong seal"]
    (path / "sealed/1.json").write_bytes(content)
    shutil.copy(path / "sealed/1.json", path / "sealed/0.json")
    findings = named(verify(path), "sealed/0.json")
    assert [item.kind for item in findings] == ["wrong seal"]
    assert "seal of shard 1" in findings[0].detail
    shutil.copy(path / "sealed/1.json", path / "sealed/999.json")
    assert [item.kind for item in named(verify(path), "sealed/999.json")] == ["wrong seal"]


def test_a_sound_file_of_another_place_or_store_is_found_although_all_its_chunks_match(tmp_path: Path) -> None:
    lengths = [16] * 8
    options: dict[str, Any] = {"shard_rows": 32, "codec": "raw"}
    path = make_store(tmp_path / "s", lengths, **options).path
    other = make_store(tmp_path / "other", lengths, seed=1, **options).path
    names = ("hidden/1/bits/c/1/0", "hidden/3/bits/c/1/0", "hidden/1/bits/c/2/0")
    assert len({os.stat(path / name).st_size for name in names}) == 1
    for source in (path / names[1], path / names[2], other / names[0]):
        content = (path / names[0]).read_bytes()
        shutil.copy(source, path / names[0])
        (finding,) = verify(path)
        assert (finding.kind, finding.object, finding.samples) == ("corrupt", names[0], (2, 3))
        (path / names[0]).write_bytes(content)


def test_the_checksum_of_an_object_is_that_of_zip_over_all_its_bytes(path: Path) -> None:
    for seal in ("plan", "target", "0"):
        objects = json.loads((path / f"sealed/{seal}.json").read_text())["objects"]
        assert objects
        for name, record in objects.items():
            assert int(record["crc32"], 16) == binascii.crc32((path / name).read_bytes()), name


def test_a_manifest_of_another_plan_is_found(path: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", LENGTHS, shard_rows=SHARD_ROWS, codec="raw")
    shutil.copy(other.path / "zarr.json", path / "zarr.json")
    assert {item.object for item in verify(path)} >= {"sealed/plan.json", "sealed/target.json", "sealed/0.json"}


NONSENSE = [
    b"",
    b"\xff\xfe\x00",
    b"null",
    b"[]",
    b"{}",
    b'{"objects": 3, "crc32c": "00000000"}',
    b'{"attributes": {"dflash": {"format_version": 1}}}',
    b'{"attributes": {"dflash": {"format_version": 1e999, "x": NaN}}}',
    b'{"attributes": 7}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a": "\\ud800"}',
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_in_any_json_file_is_a_finding_and_a_clear_error(path: Path, nonsense: bytes) -> None:
    for name in [name for name in all_files(path) if name.endswith(".json")]:
        content = (path / name).read_bytes()
        (path / name).write_bytes(nonsense)
        assert named(verify(path), name), name
        with suppress(DflashError):  # anything else would be a traceback for the user
            store = Store.open(path)
            assert store.target_attributes.hidden_size == 16
            store.read_hidden(0)
            store.target_array("lm_head")
        (path / name).write_bytes(content)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        verify(tmp_path / "missing")
    with pytest.raises(StoreError, match="not a dflash store"):
        verify(tmp_path)
    with pytest.raises(StoreError, match="not a dflash store"):  # before all files of a wrong folder are counted
        num_bytes_to_verify(tmp_path)


def test_findings_are_plain_json(path: Path) -> None:
    flip(path / "hidden/1/bits/c/0/0", 3)
    plain = json.loads(json.dumps([item.to_dict() for item in verify(path)]))
    assert plain[0]["object"] == "hidden/1/bits/c/0/0"
    assert plain[0]["samples"] == [0, 0]


def test_a_shard_written_again_after_its_seal_was_lost_heals_the_store(path: Path) -> None:
    (path / "sealed/1.json").unlink()
    assert verify(path)
    write_shard(path, Store.open(path).manifest, 1, rejected=(REJECTED,))
    assert verify(path) == []


GOOD = sample_states(6, 8, 1, 0, 0)[:, 0]


def patched(rows: slice | int, bits: int) -> NDArray[np.uint16]:
    hidden = GOOD.copy()
    hidden[rows] = bits
    return hidden


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [
        (GOOD, None),
        (GOOD[:1], None),
        (patched(2, 0x0000), None),  # one zero row is unusual but possible
        (patched(slice(None), 0x0000), "all zero"),
        (patched(slice(None), 0x8000), "all zero"),
        (patched(slice(None), 0x3F80), "constant"),
        (np.repeat(GOOD[:1], 5, axis=0), "constant"),
        (patched(4, 0x7FC0), "NaN or Inf at token 4"),
        (patched(slice(3, 5), 0xFF80), "NaN or Inf at token 3"),
        (patched(0, 0x7F7F), None),  # the largest finite value
    ],
)
def test_unusable_hidden_states_are_told_from_unusual_ones(hidden: NDArray[np.uint16], reason: str | None) -> None:
    assert find_bad_layer(hidden) == reason


@pytest.fixture
def many_chunks(tmp_path: Path) -> Store:
    """One large shard, whose hidden states make up most of the store."""
    return make_store(tmp_path / "many.zarr", [40] * 200, hidden_size=64, codec="raw", shard_rows=40 * 200, tied=False)


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_a_spot_check_reads_about_its_share_of_the_chunks_and_always_the_same_for_a_seed(
    many_chunks: Store, rate: float
) -> None:
    checks = [spot_check(many_chunks.path, rate, seed=seed) for seed in (1, 1, 2)]
    assert [check.findings for check in checks] == [[], [], []]
    assert checks[0] == checks[1] != checks[2]
    assert checks[0].bytes_total == many_chunks.bytes_on_disk()
    num_chunks = 2 * 200 * 5  # of hidden states, nearly all there is
    spread = 4 * (rate * (1 - rate) / num_chunks) ** 0.5
    unsampled = 0.05  # metadata, indexes, files of the target
    assert rate - spread < checks[0].share < rate + spread + unsampled


def test_spot_checks_find_a_flipped_bit_as_often_as_their_rate_says_and_name_the_sample(many_chunks: Store) -> None:
    name, rate, num_seeds = "hidden/1/bits/c/0/0", 0.25, 200
    start = int(many_chunks.samples.start[7])
    flip(many_chunks.path / name, (start + 9) * 64 * 2 + 4 * (start // 8))
    found = [item for seed in range(num_seeds) for item in spot_check(many_chunks.path, rate, seed=seed).findings]
    assert {(item.kind, item.object, item.shard, item.samples) for item in found} == {("corrupt", name, 0, (7, 7))}
    spread = 4 * (rate * (1 - rate) * num_seeds) ** 0.5
    assert abs(len(found) - rate * num_seeds) < spread


@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_spot_checks_find_whatever_needs_no_chunk_to_be_read(path: Path, rate: float) -> None:
    for name in all_files(path):
        content = (path / name).read_bytes()
        is_shard = "/c/" in name
        damaged = [content[:-1], content + b"\0", content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]]
        for changed in damaged if is_shard or rate == 1 else [*damaged, bytes([content[0] ^ 1]) + content[1:]]:
            (path / name).write_bytes(changed)
            assert named(spot_check(path, rate).findings, name), name
        (path / name).unlink()
        assert spot_check(path, rate).findings, name
        (path / name).write_bytes(content)
    (path / "notes.txt").write_bytes(b"x")
    assert [item.kind for item in spot_check(path, rate).findings] == ["foreign"]


def test_a_spot_check_of_everything_finds_a_flipped_bit_in_any_file(path: Path) -> None:
    rng = random.Random(5)
    for name in all_files(path):
        content = (path / name).read_bytes()
        flip(path / name, rng.randrange(len(content)), rng.randrange(8))
        assert named(spot_check(path, 1.0).findings, name), name
        (path / name).write_bytes(content)
    assert spot_check(path, 1.0).share == 1.0


def test_every_spot_check_finds_damage_that_makes_all_samples_unreadable(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", LENGTHS, codec="int8", shard_rows=SHARD_ROWS).path
    for name in ("samples/start/c/0", "samples/length/c/0", "hidden/3/channel_scale/c/0"):
        content = (path / name).read_bytes()
        flip(path / name, 3)
        assert named(spot_check(path, 1e-9).findings, name), name
        (path / name).write_bytes(content)
