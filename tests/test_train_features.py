"""Scales of context features, noise on them, and what export makes of the scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_train_loop import settings

from cache_tools.codecs import bf16_to_float32
from cache_tools.errors import StoreError
from cache_tools.reader import Store
from cache_tools.synthetic import make_store
from train.attention import BlockLayout
from train.export import export_drafter, load_drafter
from train.features import NUM_CALIBRATION_SAMPLES, add_noise, channel_rms
from train.loading import drafter_of_run
from train.loop import train
from train.state import prepare

LENGTHS = [9, 14, 6, 21, 11, 8]
LAYERS = (3, 1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("features") / "s.zarr", LENGTHS)


def test_the_scale_is_the_rms_of_each_channel_without_first_tokens(store: Store) -> None:
    assert store.num_samples <= NUM_CALIBRATION_SAMPLES
    rows = np.concatenate([bf16_to_float32(store.read_hidden(i, LAYERS))[1:] for i in range(store.num_samples)])
    expected = np.sqrt((rows.astype(np.float64) ** 2).mean(axis=0))
    found = channel_rms(store, LAYERS, np.arange(store.num_samples))
    assert found.shape == (2, 16) and found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_a_silent_channel_gets_the_smallest_scale_of_its_layer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    original = store.read_hidden

    def read_hidden(sample: int, layer_ids: object = None, out: object = None) -> NDArray[np.uint16]:
        states = original(sample, LAYERS)
        states[:, 0, 4] = 0
        return states

    monkeypatch.setattr(store, "read_hidden", read_hidden)
    found = channel_rms(store, LAYERS, np.arange(store.num_samples))
    assert found[0, 4] == found[0, torch.arange(16) != 4].min() > 0


def test_a_layer_of_zeros_is_refused_by_its_id(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    original = store.read_hidden

    def read_hidden(sample: int, layer_ids: object = None, out: object = None) -> NDArray[np.uint16]:
        states = original(sample, LAYERS)
        states[:, 1] = 0
        return states

    monkeypatch.setattr(store, "read_hidden", read_hidden)
    with pytest.raises(StoreError, match=r"layers \[1\]"):
        channel_rms(store, LAYERS, np.arange(store.num_samples))


def test_no_samples_and_samples_of_one_token_are_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no sample is left"):
        channel_rms(store, LAYERS, np.array([], dtype=np.int64))
    short = make_store(tmp_path / "short.zarr", [1, 1, 1])
    with pytest.raises(StoreError, match="too short"):
        channel_rms(short, LAYERS, np.arange(3))


def test_noise_of_a_sample_does_not_depend_on_its_pack() -> None:
    features, unit = torch.zeros(10, 6), torch.tensor([1.0, 1, 1, 5, 5, 5])
    options = {"scale": 0.1, "unit": unit, "seed": 3, "step": 7}
    one = add_noise(features, torch.tensor([0, 4, 10]), [8, 2], **options)  # type: ignore[arg-type]
    two = add_noise(features, torch.tensor([0, 6, 10]), [2, 8], **options)  # type: ignore[arg-type]
    assert torch.equal(one[:4], two[6:]) and torch.equal(one[4:], two[:6])
    other = add_noise(features, torch.tensor([0, 4, 10]), [8, 2], **{**options, "step": 8})  # type: ignore[arg-type]
    assert not torch.equal(one, other) and torch.equal(features, torch.zeros(10, 6))


def test_noise_has_the_asked_size_relative_to_its_layer() -> None:
    unit = torch.tensor([1.0] * 8 + [20.0] * 8)
    noisy = add_noise(torch.zeros(4000, 16), torch.tensor([0, 4000]), [1], scale=0.05, unit=unit, seed=0, step=0)
    spread = noisy.std(dim=0) / unit
    assert torch.allclose(spread, torch.full_like(spread, 0.05), rtol=0.1)


def test_noise_of_a_run_is_measured_against_each_layer_by_itself_and_is_off_by_default(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deep layers are much larger than shallow ones: one size for all would drown these."""
    rms = torch.tensor([[3.0, 4.0] * 8, [30.0, 40.0] * 8])
    monkeypatch.setattr("train.state.channel_rms", lambda *_, **__: rms)
    for whiten, expected in ((True, torch.ones(2)), (False, torch.tensor([12.5, 1250.0]).sqrt())):
        config = settings(store.path, tmp_path / "run", layer_ids=LAYERS, whiten=whiten)
        assert config.noise_start == config.noise_end == 0
        unit = prepare(config, lambda _: None).noise_unit.view(2, 16)
        torch.testing.assert_close(unit, expected[:, None].expand(2, 16))


@pytest.mark.parametrize("whiten", [True, False])
def test_the_exported_drafter_computes_what_the_trainer_computes(store: Store, tmp_path: Path, whiten: bool) -> None:
    """Scaled features through the trained `fc`, and raw ones through the exported `fc`: equal final states."""
    config = settings(store.path, tmp_path / "run", steps=4, whiten=whiten)
    train(config, say=lambda _: None)
    state = prepare(config, lambda _: None)
    folded = drafter_of_run(config.out)
    export_drafter(folded, tmp_path / "exported")
    exported = load_drafter(tmp_path / "exported", dtype=torch.float32)
    with state.open_loader() as loader, torch.no_grad():
        pack = next(loader).packs[0]
        anchors = torch.tensor([2, 5])
        layout = BlockLayout(anchors, pack.cu_seqlens, config.block_size)
        block = torch.full((2, config.block_size), config.mask_token_id)
        block[:, 0] = pack.input_ids[anchors]
        ones = torch.ones_like(state.feature_scale)
        embeds, raw = state.embed(block), pack.tapped.to_features(state.device, torch.float32, ones)
        trained = state.drafter(embeds, state.drafter.context(raw * state.feature_scale), layout)
        torch.testing.assert_close(folded(embeds, folded.context(raw), layout), trained, rtol=1e-4, atol=1e-5)
        rounded = exported(embeds, exported.context(raw), layout)
    assert (rounded - trained).norm() < 0.02 * trained.norm()
    assert torch.equal(state.feature_scale, torch.ones(32)) == (not whiten)
