"""Runs that quantise hidden states, or keep the target's prediction."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from precompute_cases import (
    Kind,
    directory_bytes,
    make_precompute_config,
    make_target,
)
from transformers import AutoModelForCausalLM

from cache_tools.arrays import hidden_arrays
from cache_tools.codecs import bf16_to_float32, float32_to_bf16_bits
from cache_tools.errors import TargetError
from cache_tools.integrity import verify
from cache_tools.quantise import QUANTISED, decode, encode
from cache_tools.reader import Store
from precompute.calibration import calibration_samples
from precompute.planning import plan
from precompute.reporting import plan_report
from precompute.run import run, write_plan
from precompute.target import Target

pytestmark = pytest.mark.usefixtures("small_shards")


def computed(target: Path, data: Path, path: Path, **changes: Any) -> Store:
    run(make_precompute_config(target, data, path, **changes))
    return Store.open(path)


@pytest.mark.parametrize("codec", QUANTISED)
def test_a_quantised_store_holds_what_encoding_the_lossless_states_gives(
    codec: Any, target: Path, data: Path, tmp_path: Path
) -> None:
    exact = computed(target, data, tmp_path / "exact")
    store = computed(target, data, tmp_path / "store", codec=codec)
    assert verify(store.path) == []
    assert store.num_shards > 3
    for sample in range(store.num_samples):
        states = exact.read_hidden(sample)
        for i, layer_id in enumerate(store.layer_ids):
            scales = store.channel_scales[layer_id]
            encoded = encode(codec, states[1:, i], scales)
            stored = dict(store.read_parts(sample, layer_id))
            assert np.array_equal(stored.pop("first"), states[:1, i])
            assert {name: part[1:].tobytes() for name, part in stored.items()} == {
                name: part.tobytes() for name, part in encoded.items()
            }
            states[1:, i] = float32_to_bf16_bits(decode(codec, encoded, scales))
        assert np.array_equal(store.read_hidden(sample), states), sample


def test_scales_are_the_rms_of_each_channel_without_first_tokens(target: Path, data: Path, tmp_path: Path) -> None:
    exact = computed(target, data, tmp_path / "exact")
    store = computed(target, data, tmp_path / "store", codec="int8")
    chosen = calibration_samples(store)
    assert sorted(chosen) == list(range(store.num_samples))  # all of so few
    rows = np.concatenate([bf16_to_float32(exact.read_hidden(sample)[1:]) for sample in chosen])
    rms = np.sqrt(np.square(rows, dtype=np.float64).mean(axis=0))
    for i, layer_id in enumerate(store.layer_ids):
        # One sample at a time is not always bit for bit what a padded batch gives.
        np.testing.assert_allclose(store.channel_scales[layer_id], rms[i], rtol=1e-2)


def test_any_number_of_workers_and_a_resumed_run_give_the_same_bytes(target: Path, data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"codec": "int4", "teacher": "topk:4"}
    one = computed(target, data, tmp_path / "one", **options)
    two = computed(target, data, tmp_path / "two", workers=2, threads=2, **options)
    assert directory_bytes(one.path) == directory_bytes(two.path)
    torn = shutil.copytree(one.path, tmp_path / "torn")
    for shard in (0, 2):
        (torn / f"sealed/{shard}.json").unlink()
    resumed = computed(target, data, torn, **options)
    assert directory_bytes(one.path) == directory_bytes(resumed.path)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "hybrid"])
@pytest.mark.parametrize("layer_ids", [(0, 2), (1, 3)])  # without and with the last layer as a tap
@torch.inference_mode()
def test_the_teacher_is_the_targets_own_prediction(
    kind: Kind, layer_ids: tuple[int, ...], data: Path, tmp_path: Path
) -> None:
    folder = make_target(tmp_path / "target", kind)
    options: dict[str, Any] = {"layer_ids": layer_ids, "limit": 6, "batch_tokens": 1}  # samples alone: no padding
    hidden = computed(folder, data, tmp_path / "hidden", teacher="hidden", **options)
    top = computed(folder, data, tmp_path / "top", teacher="topk:7", **options)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.bfloat16).eval()
    for sample in range(hidden.num_samples):
        ids, mask = hidden.read_tokens(sample)
        kept = np.append(mask[1:], False)
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].float()
        expected = torch.log_softmax(logits, dim=-1)
        found = top.read_teacher(sample)
        assert not found["topk_ids"][~kept].any() and not found["topk_logprobs"][~kept].any()
        values = torch.from_numpy(found["topk_logprobs"])[kept]
        chosen = torch.from_numpy(found["topk_ids"]).long()[kept]
        torch.testing.assert_close(values, expected[kept].gather(1, chosen), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(values, expected[kept].topk(7).values, rtol=2e-2, atol=2e-2)
        states = hidden.read_teacher(sample)["bits"]
        assert not states[~kept].any()
        last = torch.from_numpy(bf16_to_float32(states)).bfloat16()[kept]
        norm = next(m for name, m in model.named_modules() if name.endswith("model.norm"))
        through_head = model.lm_head(norm(last)).float()
        torch.testing.assert_close(through_head, logits[kept], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("on_bad", ["fail", "skip"])
def test_channel_scales_that_no_sample_can_give_are_a_target_error(
    on_bad: Any, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Target.hidden_states

    def broken(self: Target, batch: Any) -> Any:
        first, second = original(self, batch)
        return [first, torch.full_like(second, torch.nan)]

    monkeypatch.setattr(Target, "hidden_states", broken)
    with pytest.raises(TargetError, match=r"layer 2(.|\n)*NaN or Inf in each of 30 samples"):
        computed(target, data, tmp_path / "store", codec="int8", on_bad=on_bad)
    assert not Store.open(tmp_path / "store").sealed


@pytest.mark.parametrize("teacher", ["hidden", "hidden:all", "topk:4"])
def test_a_sample_whose_teacher_is_not_finite_is_unusable(
    teacher: str, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_precompute_config(target, data, tmp_path / "store", teacher=teacher)
    write_plan(plan(config), tmp_path / "store")
    victim = 3
    ids, _ = Store.open(tmp_path / "store").read_tokens(victim)
    original = Target.hidden_states

    def broken(self: Target, batch: Any) -> Any:
        *taps, last = original(self, batch)
        is_victim = [torch.full((len(found),), np.array_equal(found, ids)) for found in batch]
        return [*taps, last.masked_fill(torch.cat(is_victim)[:, None], torch.nan)]

    monkeypatch.setattr(Target, "hidden_states", broken)
    with pytest.raises(TargetError, match=f"sample {victim}, layer 3: NaN or Inf at token"):
        run(config)
    store = computed(target, data, tmp_path / "store", teacher=teacher, on_bad="skip")
    assert {sample: item.layer for sample, item in store.rejections.items()} == {victim: 3}
    assert verify(store.path) == []


def test_plan_counts_codec_and_teacher(target: Path, data: Path, tmp_path: Path) -> None:
    reports = {
        (codec, teacher): plan_report(plan(make_precompute_config(target, data, codec=codec, teacher=teacher)), None)
        for codec in ("raw", "int8", "fp8", "int4")
        for teacher in ("none", "hidden", "hidden:all", "topk:8")
    }
    expected = {codec: reports[codec, "none"]["bytes"]["expected"] for codec in ("raw", "int8", "fp8", "int4")}
    assert expected["raw"] > 1.5 * expected["int8"] > 2 * expected["int4"]
    assert expected["fp8"] == expected["int8"]
    teachers = [reports["int8", kind]["bytes"]["teacher"] for kind in ("none", "topk:8", "hidden", "hidden:all")]
    supervised = reports["int8", "none"]["supervised"]
    assert teachers[0] == 0 and teachers[1] == supervised * 8 * 8 and teachers[3] > teachers[2] > 0
    for codec, num_bytes in expected.items():
        store = computed(target, data, tmp_path / codec, codec=codec)
        assert sum(map(chunk_bytes, store.path.glob("hidden/*/*/c/*/0"))) + scalar_bytes(store) == num_bytes


def chunk_bytes(path: Path) -> int:
    """Bytes of the chunks of one object of a matrix, without checksums and padding rows of chunks left out."""
    store = Store.open(path.parents[5])
    array = hidden_arrays(store.manifest, int(path.parts[-5]))[path.parts[-4]]
    index = np.frombuffer(path.read_bytes()[-4 - 16 * array.num_chunks : -4], "<u8").reshape(-1, 2)
    present = index[index[:, 0] != 2**64 - 1]
    return int((present[:, 1] - 4).sum())


def scalar_bytes(store: Store) -> int:
    """What arrays of one number per token take for the chunks of the samples."""
    arrays = [a for i in store.layer_ids for a in hidden_arrays(store.manifest, i).values() if len(a.shape) == 1]
    chunk_rows = store.manifest.layout.chunk_rows
    return len(arrays) * 4 * int((-(-store.samples.length // chunk_rows) * chunk_rows).sum())
