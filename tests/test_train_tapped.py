"""Tapped states: whatever the codec, layers and scale, the drafter gets what the store's reference decoding gives."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_tools.codecs import bf16_to_float32
from cache_tools.errors import CorruptError
from cache_tools.quantise import GROUP_SIZE, QUANTISED, decode
from cache_tools.reader import Store
from cache_tools.synthetic import make_store
from train.batches import Pack
from train.loader import Loader, pack_plan
from train.tapped import bytes_per_token

LENGTHS = [1, 30, 7, 40, 2, 13, 25, 9, 17]
STORED, LAYERS = (1, 2, 3), (3, 1)
HIDDEN = 2 * GROUP_SIZE
CPU = torch.device("cpu")
CODECS = ("bf16", "raw", *QUANTISED)


@pytest.fixture(scope="module", params=CODECS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("tapped") / "s.zarr"
    return make_store(path, LENGTHS, hidden_size=HIDDEN, layer_ids=STORED, codec=request.param, chunk_rows=4)


def packs_of(store: Store, num_steps: int = 6, **options: Any) -> Any:
    plan = pack_plan(store, seed=3, token_budget=48, packs_per_step=2)
    with Loader(store, plan, layer_ids=LAYERS, prefetch_bytes=0, num_threads=2, **options) as loader:
        for batch in islice(loader, num_steps):
            yield from batch.packs


def expected_values(store: Store, sample: int) -> NDArray[np.float32]:
    """[length, F * H] in float32, by the numpy reference alone."""
    columns = []
    for layer_id in LAYERS:
        exact = bf16_to_float32(store.read_hidden(sample, [layer_id])[:, 0])
        if store.manifest.codec in QUANTISED:
            encoded = {name: part for name, part in store.read_parts(sample, layer_id).items() if name != "first"}
            exact[1:] = decode(store.manifest.codec, encoded, store.channel_scales[layer_id])[1:]
        columns.append(exact)
    return np.concatenate(columns, axis=1)


def samples_of(pack: Pack, features: Tensor) -> Any:
    bounds = pack.cu_seqlens.tolist()
    for i, sample in enumerate(pack.samples):
        yield sample, features[bounds[i] : bounds[i + 1]]


def test_float32_features_are_the_reference_bit_for_bit(store: Store) -> None:
    ones = torch.ones(len(LAYERS) * HIDDEN)
    seen = set()
    for pack in packs_of(store):
        for sample, found in samples_of(pack, pack.tapped.to_features(CPU, torch.float32, ones)):
            assert np.array_equal(found.numpy(), expected_values(store, sample)), sample
            seen.add(sample)
    assert len(seen) == len(LENGTHS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_multiplies_every_channel_of_its_own_layer(store: Store, dtype: torch.dtype) -> None:
    scale = torch.linspace(0.5, 2.0, len(LAYERS) * HIDDEN).to(dtype)
    for pack in packs_of(store, num_steps=2):
        features = pack.tapped.to_features(CPU, dtype, scale)
        assert features.dtype == dtype and features.is_contiguous()
        for sample, found in samples_of(pack, features):
            expected = torch.from_numpy(expected_values(store, sample)) * scale.float()
            torch.testing.assert_close(
                found.float(), expected, rtol=2**-22 if dtype == torch.float32 else 2**-7, atol=0
            )


@pytest.mark.parametrize("store", ["bf16", "raw"], indirect=True)
def test_lossless_bfloat16_features_are_the_stored_bits(store: Store) -> None:
    ones = torch.ones(len(LAYERS) * HIDDEN, dtype=torch.bfloat16)
    for pack in packs_of(store, num_steps=3):
        for sample, found in samples_of(pack, pack.tapped.to_features(CPU, torch.bfloat16, ones)):
            stored = store.read_hidden(sample, LAYERS).reshape(len(found), -1)
            assert np.array_equal(found.view(torch.int16).numpy().view(np.uint16), stored)


def test_codes_stay_codes_until_they_are_on_the_device(store: Store) -> None:
    """A pack takes the memory of its codes, and what lies in it are the bytes of the store."""
    pack = next(packs_of(store))
    num_tokens = int(pack.cu_seqlens[-1])
    held = sum(part.numel() * part.element_size() for part in pack.tapped.parts.values())
    assert held == num_tokens * bytes_per_token(store.manifest.codec, len(LAYERS), HIDDEN)
    assert held <= num_tokens * len(LAYERS) * (HIDDEN * 2 if store.manifest.codec in ("bf16", "raw") else HIDDEN + 4)
    for name, part in pack.tapped.parts.items():
        assert part.is_contiguous()
        if store.manifest.codec in QUANTISED:
            last = store.read_parts(pack.samples[-1], LAYERS[1])[name]
            assert np.array_equal(part[1, num_tokens - len(last) :].numpy(), last)


def test_a_sample_that_cannot_be_read_is_zeros_in_every_part(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    method = "read_parts" if store.manifest.codec in QUANTISED else "read_hidden"
    original = getattr(store, method)

    def read(sample: int, *rest: Any, **named: Any) -> Any:
        if sample == 4:
            raise CorruptError("bad checksum")
        return original(sample, *rest, **named)

    monkeypatch.setattr(store, method, read)
    ones, found_zeros = torch.ones(len(LAYERS) * HIDDEN), 0
    for pack in packs_of(store, skip_unreadable=True):
        for sample, found in samples_of(pack, pack.tapped.to_features(CPU, torch.float32, ones)):
            assert bool(found.any()) == (sample != 4)
            found_zeros += sample == 4
    assert found_zeros > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_the_features_that_the_cpu_makes(store: Store) -> None:
    scale = torch.linspace(0.5, 2.0, len(LAYERS) * HIDDEN)
    for pack in packs_of(store, num_steps=3):
        assert all(part.is_pinned() for part in pack.tapped.parts.values())
        on_gpu = pack.tapped.to_features(torch.device("cuda"), torch.float32, scale.cuda())
        torch.testing.assert_close(on_gpu.cpu(), pack.tapped.to_features(CPU, torch.float32, scale), rtol=1e-6, atol=0)
