"""The target's parts come out of a store as they were put in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cache_tools.synthetic import make_store
from train.target_parts import TargetParts


def bits_of(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).view(torch.bfloat16)


def test_tied_target_shares_one_tensor_bit_equal_to_the_store(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s.zarr", [5, 9], tied=True)
    parts = TargetParts.from_store(store)
    assert parts.lm_head is parts.embedding and parts.embedding.dtype == torch.bfloat16
    assert torch.equal(parts.embedding, bits_of(store.target_array("embed_tokens")))


def test_untied_target_has_its_own_head_in_the_dtype_asked_for(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s.zarr", [5, 9], tied=False)
    parts = TargetParts.from_store(store, dtype=torch.float32)
    assert parts.lm_head.dtype == torch.float32 and parts.lm_head is not parts.embedding
    assert torch.equal(parts.lm_head, bits_of(store.target_array("lm_head")).float())


@pytest.mark.parametrize("adds_one", [False, True])
def test_norm_equals_the_formula_in_float64(adds_one: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(8, generator=generator), torch.randn(3, 8, generator=generator)
    empty = torch.empty(0)
    parts = TargetParts(embedding=empty, lm_head=empty, norm_weight=weight, norm_eps=1e-5, norm_adds_one=adds_one)
    wide = hidden.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + adds_one)
    torch.testing.assert_close(parts.norm(hidden).double(), expected, rtol=1e-5, atol=1e-6)
