"""The table of codecs against sizes of real stores and errors computed in another way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from cache_tools.cli import main
from cache_tools.codec_report import NUM_TOKENS, CodecComparison, choose_samples, compare_in_store
from cache_tools.codecs import bf16_to_float32, float32_to_bf16_bits
from cache_tools.errors import StoreError
from cache_tools.progress import Progress
from cache_tools.quantise import QUANTISED, decode, encode
from cache_tools.reader import Store
from cache_tools.synthetic import make_store

LENGTHS = [5, 17, 30, 8, 1, 40, 12]
HIDDEN = 64
EIGHT_ROWS = dict.fromkeys(("bf16", "raw", *QUANTISED), 8)


def states(seed: int, length: int, num_layers: int = 2) -> NDArray[np.uint16]:
    """[length, num_layers, HIDDEN] bits; the first row is an attention sink."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(np.random.default_rng(0).normal(0, 2, (num_layers, HIDDEN)))
    values = rng.normal(size=(length, num_layers, HIDDEN)) * sizes
    values[0] *= 1000
    return float32_to_bf16_bits(values.astype(np.float32))


def quiet() -> Progress:
    return Progress(total=None, unit="samples", desc="codecs")


def hidden_bytes(store: Store) -> int:
    return sum(file.stat().st_size for file in store.path.glob("hidden/**/c/**/*") if file.is_file())


@pytest.mark.parametrize("codec", ["bf16", "raw", *QUANTISED])
def test_bytes_per_token_are_those_of_a_store_of_that_codec(codec: Any, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", LENGTHS, codec=codec, hidden_size=HIDDEN)
    comparison = CodecComparison(store.layer_ids, HIDDEN, EIGHT_ROWS)
    comparison.calibrate(states(1, 50))
    for sample in range(store.num_samples):
        comparison.measure(store.read_hidden(sample))
    found = {result.codec: result for result in comparison.report().codecs}[codec]
    scales = len(store.layer_ids) * (4 * HIDDEN + 4 + 20) if codec in QUANTISED else 0
    per_token = (hidden_bytes(store) - scales) / store.num_tokens
    # Left out: the ends of indexes, entries of chunks that were never written, and those of token scales.
    assert 0.85 * per_token < found.bytes_per_token <= per_token
    assert found.ratio == pytest.approx(2 * 2 * HIDDEN / found.bytes_per_token)


def test_errors_are_those_of_decoded_states_without_first_tokens_on_other_samples() -> None:
    comparison = CodecComparison((3, 7), HIDDEN, EIGHT_ROWS)
    comparison.calibrate(states(1, 200))
    measured = [states(seed, 30) for seed in (2, 3)]
    for bits in measured:
        comparison.measure(bits)
    report = comparison.report()
    assert (report.calibration_tokens, report.measured_tokens, report.measured_samples) == (200, 60, 2)
    assert report.rows_per_token == 64 / 60
    rows = np.concatenate([bits[1:] for bits in measured])
    for result in report.codecs:
        if result.codec not in QUANTISED:
            assert result.layers == () and result.relative_l2 == 0
            continue
        assert [layer.layer_id for layer in result.layers] == [3, 7]
        for index, layer in enumerate(result.layers):
            scale = np.sqrt((bf16_to_float32(states(1, 200)[1:, index]).astype(np.float64) ** 2).mean(0))
            scale = scale.astype(np.float32)
            true = bf16_to_float32(rows[:, index])
            decoded = decode(result.codec, encode(result.codec, rows[:, index], scale), scale)
            error = bf16_to_float32(float32_to_bf16_bits(decoded)) - true
            by_channel = np.linalg.norm(error, axis=0) / np.linalg.norm(true, axis=0)
            assert layer.relative_l2 == pytest.approx(np.linalg.norm(error) / np.linalg.norm(true), rel=1e-5)
            assert layer.worst_channel == by_channel.argmax()
            assert layer.worst_channel_error == pytest.approx(by_channel.max(), rel=1e-5)
            assert layer.cosine == pytest.approx(1 - layer.relative_l2**2 / 2, abs=2e-3) and layer.cosine < 1


def test_calibration_and_measurement_use_different_samples_of_two_tokens_or_more() -> None:
    lengths = np.random.default_rng(0).integers(1, 3000, 500)
    usable = np.arange(0, 500, 2)
    calibration, measured = choose_samples(lengths, usable, "here")
    assert not set(calibration) & set(measured) and set(calibration + measured) <= set(usable.tolist())
    assert lengths[calibration + measured].min() > 1
    assert lengths[calibration + measured].sum() < NUM_TOKENS + 3000
    assert choose_samples(lengths, usable, "here") == (calibration, measured)
    with pytest.raises(StoreError, match="too few samples"):
        choose_samples(np.array([1, 9, 1]), np.arange(3), "here")


def test_a_store_is_compared_on_what_it_has_so_far(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", LENGTHS * 3, hidden_size=HIDDEN, shards=(0, 1), rejected=(1,))
    report = compare_in_store(store, quiet())
    assert 0 < report.measured_samples < store.num_samples / 2
    assert {result.codec: result.relative_l2 < 0.12 for result in report.codecs} == dict.fromkeys(
        ("bf16", "raw", *QUANTISED), True
    )


def test_the_command_prints_a_table_and_json_with_the_same_numbers(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", LENGTHS, hidden_size=HIDDEN).path
    lines = CliRunner().invoke(main, ["codecs", str(path)]).stdout.splitlines()
    facts = json.loads(CliRunner().invoke(main, ["codecs", str(path), "--json"]).stdout)
    assert len(lines) == 3 + 2 + 3 * 2
    for codec in facts["codecs"]:
        line = next(line for line in lines if line.startswith(codec["codec"]))
        assert f"{codec['bytes_per_token']:,.0f}" in line and f"{codec['ratio']:.2f}x" in line
        assert not codec["layers"] or f"{codec['layers'][0]['relative_l2']:.2%}" in line


def test_a_codec_that_does_not_fit_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", LENGTHS, hidden_size=48).path
    result = CliRunner().invoke(main, ["codecs", str(path)])
    assert result.exit_code == 0 and "int4   the codec int4 needs" in result.stdout and "int8 " in result.stdout


def test_quantised_stores_and_targets_are_refused_with_the_command_to_use(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", LENGTHS, hidden_size=HIDDEN, codec="int8").path
    result = CliRunner().invoke(main, ["codecs", str(path)])
    assert result.exit_code == 1 and "codec int8" in result.output and "dflash-precompute codecs" in result.output
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    result = CliRunner().invoke(main, ["codecs", str(target)])
    assert result.exit_code == 2 and f"dflash-precompute codecs --target {target}" in result.output
