"""`dflash-cache`: stable keys, exit codes, no tracebacks, and a quick `--help`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cache_tools.cli import main
from cache_tools.reader import Store
from cache_tools.synthetic import make_store

LENGTHS = [5, 17, 30, 8]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "s.zarr", LENGTHS, rejected=(2,))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_info_has_the_documented_keys_and_true_values(store: Store) -> None:
    result = run("info", store.path, "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    size = sum(file.stat().st_size for file in store.path.rglob("*") if file.is_file())
    expected = {
        "format_version": 1,
        "num_samples": 4,
        "num_tokens": 60,
        "layer_ids": [1, 3],
        "hidden_size": 16,
        "codec": "bf16",
        "bytes_on_disk": size,
        "bytes_per_token": size / 60,
        "complete": True,
        "shards": {"sealed": store.num_shards, "total": store.num_shards},
    }
    assert {key: facts[key] for key in expected} == expected
    hidden = sum(file.stat().st_size for file in store.path.glob("hidden/*/bits/c/*/0"))
    assert facts["hidden"] == {
        "tokens": 60,
        "bytes": hidden,
        "bytes_per_token": hidden / 60,
        "ratio": 60 * 2 * 16 * 2 / hidden,
    }


def test_info_of_an_unfinished_store_counts_what_is_sealed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", LENGTHS, shards=(0,))
    facts = json.loads(run("info", store.path, "--json").stdout)
    assert facts["complete"] is False
    assert facts["shards"] == {"sealed": 1, "total": store.num_shards}
    assert facts["hidden"]["tokens"] == sum(int(store.samples.length[s]) for s in store.shard_samples(0))
    planned = make_store(tmp_path / "planned", LENGTHS, shards=())
    assert run("info", planned.path).exit_code == 0
    assert json.loads(run("info", planned.path, "--json").stdout)["hidden"]["ratio"] is None


def test_info_never_counts_a_rejected_sample_whose_list_was_lost_as_usable(store: Store) -> None:
    assert json.loads(run("info", store.path, "--json").stdout)["rejected_samples"] == 1
    (lost,) = (store.path / "rejected").iterdir()
    lost.unlink()
    result = run("info", store.path)
    assert result.exit_code == 1 and result.stdout == ""
    assert "sample 2 was rejected" in result.stderr and str(lost) in result.stderr
    assert "dflash-cache verify" in result.stderr


def test_info_for_people_shows_every_fact(store: Store) -> None:
    lines = run("info", store.path).stdout.splitlines()
    facts = json.loads(run("info", store.path, "--json").stdout)
    assert [line.split("  ")[0] for line in lines] == [key.replace("_", " ") for key in facts]


def test_verify_exits_with_0_or_with_1_and_findings(store: Store) -> None:
    result = run("verify", store.path)
    assert result.exit_code == 0
    assert "ok" in result.stdout
    assert json.loads(run("verify", store.path, "--json").stdout) == {"ok": True, "findings": []}
    damaged = store.path / "hidden/1/bits/c/0/0"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = run("verify", store.path)
    assert result.exit_code == 1
    assert "truncated: hidden/1/bits/c/0/0, shard 0, samples 0 to " in result.stdout
    result = run("verify", store.path, "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    assert answer["findings"][0]["object"] == "hidden/1/bits/c/0/0"
    assert answer["findings"][0]["shard"] == 0


def test_verify_of_a_share_says_how_much_was_read_and_finds_what_it_read(store: Store) -> None:
    result = run("verify", store.path, "--sample-rate", 0.5)
    assert result.exit_code == 0
    assert re.search(r"ok: every file is there, and the \d+\.\d% of all bytes that were read match", result.stdout)
    answer = json.loads(run("verify", store.path, "--sample-rate", 0.5, "--seed", 3, "--json").stdout)
    assert answer["ok"] is True
    assert 0 < answer["bytes_read"] < answer["bytes_total"] == store.bytes_on_disk()
    damaged = store.path / "hidden/1/bits/c/0/0"
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    assert run("verify", store.path, "--sample-rate", 1).exit_code == 1
    for rate in (0, 1.5, "many"):
        assert run("verify", store.path, "--sample-rate", rate).exit_code == 2


def test_show_marks_exactly_the_supervised_tokens(store: Store) -> None:
    ids, mask = store.read_tokens(1)
    words = [f"w{token}" for token in ids]
    half = len(words) // 2
    assert mask.tolist() == [False] * half + [True] * (len(words) - half)
    text = run("show", store.path, 1).stdout
    assert text.splitlines()[1] == " ".join(words[:half]) + "⟦" + " ".join(words[half:]) + "⟧"
    assert "from synthetic:4" in text
    answer = json.loads(run("show", store.path, 1, "--json").stdout)
    assert answer["segments"] == [
        {"supervised": False, "text": " ".join(words[:half])},
        {"supervised": True, "text": " ".join(words[half:])},
    ]
    assert answer["content_id"] == store.samples.content_id[1].tobytes().hex()


def test_show_says_why_a_sample_has_no_hidden_states(store: Store, tmp_path: Path) -> None:
    assert "rejected: layer 1, NaN or Inf" in run("show", store.path, 2).stdout
    planned = make_store(tmp_path / "planned", LENGTHS, shards=())
    assert "not computed yet" in run("show", planned.path, 2).stdout


@pytest.mark.parametrize("command", [["info"], ["verify"], ["show", "0"]])
def test_what_is_no_store_is_an_error_without_traceback(tmp_path: Path, command: list[str]) -> None:
    for path in (tmp_path / "missing", tmp_path):
        result = run(command[0], path, *command[1:])
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert str(path) in result.stderr
        assert isinstance(result.exception, SystemExit)


def test_misuse_exits_with_2_and_bad_samples_or_tokenizers_with_1(store: Store) -> None:
    assert run("show", store.path, "one").exit_code == 2
    assert run("nothing").exit_code == 2
    assert "0 to 3" in run("show", store.path, 4).stderr
    (store.path / "target/files/tokenizer.json").write_text("{}")
    result = run("show", store.path, 0)
    assert result.exit_code == 1
    assert "tokenizer cannot be loaded" in result.stderr


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "from cache_tools.cli import main\n"
        "main(['verify', '--help'], standalone_mode=False)\n"
        "heavy = {'numpy', 'zarr', 'torch', 'transformers', 'numcodecs', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "exit 1" in result.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "--sample-rate", "nan"),
        ("bench", "--seconds", "nan"),
        ("bench", "--gpu-tokens-per-second", "nan"),
        ("bench", "--gpu-tokens-per-second", "inf", "--json"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(store: Store, command: tuple[str, ...]) -> None:
    result = run(*command, store.path)
    assert result.exit_code == 2, result.output
    assert "is not a finite number" in result.stderr
