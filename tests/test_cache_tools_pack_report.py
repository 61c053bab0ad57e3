"""`dflash-cache packs`: what it reads, prints, draws and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from length_laws import lognormal

from cache_tools.cli import main
from cache_tools.pack_pictures import spectrum_of
from cache_tools.pack_report import read_lengths
from cache_tools.strategies import STRATEGIES
from cache_tools.synthetic import make_store

KEYS = [
    *("token_efficiency", "padding_efficiency", "packs", "z_var", "ks", "lag1", "ljung_box_p", "fisher_period"),
    *("fisher_p", "long_dispersion", "position_p", "co_occurrence", "step_z_var", "balance_tokens", "balance_l2"),
]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["packs", *map(str, arguments)])


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, lognormal(2000, 0.75).tolist())) + "\n", encoding="utf-8")
    return path


def test_json_has_the_documented_keys_for_every_strategy(lengths_file: Path) -> None:
    result = run("--lengths", lengths_file, "--json", "--packs-per-step", 4)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report["strategies"]) == list(STRATEGIES)
    for statistics in report["strategies"].values():
        assert list(statistics) == KEYS
    assert report["num_samples"] == 2000 and report["packs_per_step"] == 4 and report["epochs"] == 2
    assert report["strategies"]["sorted-static"]["z_var"] > 10
    assert report["strategies"]["global"]["z_var"] < 1.5


def test_one_strategy_is_one_line_of_the_table(lengths_file: Path) -> None:
    lines = run("--lengths", lengths_file, "--strategy", "bucketed:0,1000,3000").stdout.splitlines()
    assert len(lines) == 2 and lines[0].split()[0] == "strategy" and lines[1].split()[0] == "bucketed:0,1000,3000"
    assert len(lines[0].split()) == len(lines[1].split()) == 1 + len(KEYS)


def test_same_lengths_as_array_give_the_same_table(lengths_file: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", read_lengths(lengths_file).astype(np.int32))
    outputs = [run("--lengths", path, "--seed", 3).stdout for path in (lengths_file, tmp_path / "lengths.npy")]
    assert outputs[0] == outputs[1] != run("--lengths", lengths_file, "--seed", 4).stdout


def test_a_store_is_compared_without_its_rejected_samples(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s.zarr", [5, 17, 30, 8], rejected=(2,))
    report = json.loads(run(store.path, "--token-budget", 40, "--json").stdout)
    assert report["num_samples"] == 3 and report["num_tokens"] == 60 - store.samples.length[2]
    assert report["strategies"]["global"]["packs"] == 2


def test_budget_and_epochs_are_obeyed(lengths_file: Path) -> None:
    def found(*arguments: object) -> dict[str, float | None]:
        report = json.loads(run("--lengths", lengths_file, "--strategy", "global", "--json", *arguments).stdout)
        values: dict[str, float | None] = report["strategies"]["global"]
        return values

    usual, half, once = found(), found("--token-budget", 24_576), found("--epochs", 1)
    assert usual["packs"] is not None and half["packs"] is not None
    assert half["packs"] == pytest.approx(2 * usual["packs"], rel=0.02)
    assert usual["co_occurrence"] is not None and once["co_occurrence"] is None


def test_picture_is_drawn(lengths_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("--lengths", lengths_file, "--plot", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_extreme_lengths_are_compared_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for lengths in ([17], [1000] * 300, [49_152, 5]):
        np.save(tmp_path / "l.npy", np.array(lengths))
        result = run("--lengths", tmp_path / "l.npy", "--strategy", "global", "--plot", tmp_path / "a.png", "--json")
        assert result.exit_code == 0, result.output
        json.loads(result.stdout, parse_constant=lambda text: pytest.fail(text))


def test_spectrum_of_white_noise_is_one() -> None:
    z = np.random.default_rng(0).standard_normal(20_000)
    periods, power = spectrum_of(z)
    assert periods[0] == 256 and periods[-1] == 2
    assert power.mean() == pytest.approx(1, abs=0.05)


def test_without_matplotlib_the_error_says_how_to_get_it(
    lengths_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    result = run("--lengths", lengths_file, "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "needs matplotlib" in result.output and "pip install" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12\nmany\n", "lengths.txt:2"),
        ("12\n-3\n", "lengths.txt:2"),
        ("12\n\n0\n", "not positive"),
        ("\n", "holds no lengths"),
        ("70000\n", "does not fit into a pack"),
    ],
)
def test_files_that_hold_no_lengths_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lengths.txt").write_text(text, encoding="utf-8")
    result = run("--lengths", tmp_path / "lengths.txt")
    assert result.exit_code in (1, 2)
    assert message in result.output and "Traceback" not in result.output


@pytest.mark.parametrize("array", [np.ones(3), np.ones((2, 2), dtype=int), np.array(["a"])])
def test_arrays_that_hold_no_lengths_are_refused(tmp_path: Path, array: np.ndarray[tuple[int, ...]]) -> None:
    np.save(tmp_path / "a.npy", array)
    result = run("--lengths", tmp_path / "a.npy")
    assert result.exit_code == 1 and "does not hold lengths" in result.output


def test_broken_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"no array")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    for name, message in (("a.npy", "not a NumPy array"), ("a.txt", "not text"), ("b.txt", "cannot be read")):
        result = run("--lengths", tmp_path / name)
        assert result.exit_code == 1 and message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "from a store or from a file"),
        (("store", "--lengths", "{file}"), "from a store or from a file"),
        (("--lengths", "{file}", "--strategy", "globall"), "did you mean global?"),
        (("--lengths", "{file}", "--epochs", "0"), "at least one epoch"),
        (("--lengths", "{file}", "--packs-per-step", "0"), "at least one pack"),
        (("--lengths", "{file}", "--plot", "a.bmp"), "no known format"),
        (("--lengths", "{file}", "--plot", "no/such/folder/a.png"), "does not exist"),
    ],
)
def test_wrong_usage_exits_with_2(lengths_file: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(*(argument.format(file=lengths_file) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.output
