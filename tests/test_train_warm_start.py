"""Draft layers that start as the target's last ones: which tensors are taken, and which folders are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cache_tools.errors import TargetError
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.target_parts import TargetParts
from train.warm_start import copy_last_layers, read_deepest_tap, use_target_norm

NUM_TARGET_LAYERS = 5
TARGET: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": NUM_TARGET_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}  # fmt: skip


def make_drafter(num_layers: int = 2, taps: tuple[int, ...] = (1, 2), **changes: Any) -> DFlashDrafter:
    return DFlashDrafter(
        DrafterConfig.for_target(
            TARGET, num_layers=num_layers, block_size=4, mask_token_id=63, target_layer_ids=taps, **changes
        )
    )


def layer_tensors(prefix: str, layers: range) -> dict[str, Tensor]:
    """Random weights in the drafter's shapes for some layers of a target, under the names of its files."""
    shapes = {n.removeprefix("layers.0."): p.shape for n, p in make_drafter(1).named_parameters() if "layers.0." in n}
    generator = torch.Generator().manual_seed(0)
    return {
        f"{prefix}layers.{layer}.{name}": torch.randn(shape, generator=generator).bfloat16()
        for layer in layers
        for name, shape in shapes.items()
    }


def write_target(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] = TARGET) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
def test_draft_layers_are_the_last_layers_in_order(tmp_path: Path, prefix: str) -> None:
    tensors = layer_tensors(prefix, range(NUM_TARGET_LAYERS))
    drafter = make_drafter()
    copied = copy_last_layers(drafter, write_target(tmp_path / "t", tensors), TARGET)
    assert len(copied) == 2 * 11 and copied == sorted(copied)
    for i, layer in enumerate(range(NUM_TARGET_LAYERS - 2, NUM_TARGET_LAYERS)):
        for name in (n for n in copied if n.startswith(f"layers.{i}.")):
            theirs = tensors[prefix + name.replace(f"layers.{i}.", f"layers.{layer}.")]
            assert torch.equal(drafter.state_dict()[name], theirs.float())


def test_other_shapes_keep_their_random_start(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", layer_tensors("model.", range(NUM_TARGET_LAYERS)))
    drafter, fresh = make_drafter(num_attention_heads=2), make_drafter(num_attention_heads=2).state_dict()
    copied = copy_last_layers(drafter, target, TARGET)
    assert not any("q_proj" in name or "o_proj" in name for name in copied)
    assert len(copied) == 2 * 9
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, fresh[name]) == (name not in copied)


def test_sharded_weights_are_read_through_their_index(tmp_path: Path) -> None:
    tensors = layer_tensors("model.", range(NUM_TARGET_LAYERS))
    names = sorted(tensors)
    write_target(tmp_path / "t", tensors)
    (tmp_path / "t" / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, tmp_path / "t" / file)
    (tmp_path / "t" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole, sharded = make_drafter(), make_drafter()
    copied = copy_last_layers(sharded, tmp_path / "t", TARGET)
    assert copied == copy_last_layers(whole, write_target(tmp_path / "whole", tensors), TARGET)
    assert all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in sharded.state_dict().items())


def test_vision_and_next_token_layers_of_the_same_number_are_not_taken(tmp_path: Path) -> None:
    tensors = layer_tensors("model.language_model.", range(NUM_TARGET_LAYERS))
    decoys = layer_tensors("mtp.", range(NUM_TARGET_LAYERS)) | layer_tensors("model.visual.", range(NUM_TARGET_LAYERS))
    plain, drafter = make_drafter(), make_drafter()
    copy_last_layers(plain, write_target(tmp_path / "plain", tensors), TARGET)
    wrong = {name: tensor + 1 for name, tensor in decoys.items()}
    copied = copy_last_layers(drafter, write_target(tmp_path / "t", tensors | wrong), TARGET)
    assert len(copied) == len(set(copied)) == 22
    assert all(torch.equal(plain.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())


def test_norms_that_multiply_by_one_plus_weight_get_their_one(tmp_path: Path) -> None:
    tensors = layer_tensors("model.", range(NUM_TARGET_LAYERS))
    drafter = make_drafter(1)
    copy_last_layers(drafter, write_target(tmp_path / "t", tensors), TARGET, norm_adds_one=True)
    for name, tensor in drafter.state_dict().items():
        if name.startswith("layers.0."):
            theirs = tensors[f"model.{name.replace('layers.0.', f'layers.{NUM_TARGET_LAYERS - 1}.')}"].float()
            assert torch.equal(tensor, theirs + 1 if tensor.ndim == 1 else theirs)


def test_tensors_outside_layers_and_tied_heads_do_not_matter(tmp_path: Path) -> None:
    tensors = layer_tensors("model.", range(NUM_TARGET_LAYERS))
    tensors |= {"model.embed_tokens.weight": torch.ones(64, 16), "model.norm.weight": torch.ones(16) * 7}
    drafter = make_drafter()
    copy_last_layers(drafter, write_target(tmp_path / "t", tensors), TARGET)  # no lm_head: it is the embedding
    assert torch.equal(drafter.norm.weight, torch.ones(16))


def test_nothing_that_fits_is_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", {"model.layers.0.mlp.up_proj.weight": torch.ones(24, 16)})
    with pytest.raises(TargetError, match="--init-target"):
        copy_last_layers(make_drafter(), target, TARGET)


@pytest.mark.parametrize("changes", [{"hidden_size": 32}, {"num_hidden_layers": 9}, {"model_type": "llama"}])
def test_another_target_is_refused_by_what_differs(tmp_path: Path, changes: dict[str, Any]) -> None:
    target = write_target(tmp_path / "t", layer_tensors("model.", range(NUM_TARGET_LAYERS)), TARGET | changes)
    (name, value) = next(iter(changes.items()))
    with pytest.raises(TargetError, match=rf"(?s){name} {value}.*{name} {TARGET[name]}"):
        copy_last_layers(make_drafter(), target, TARGET)


def test_missing_and_torn_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no target model here"):
        copy_last_layers(make_drafter(), tmp_path / "none", TARGET)
    target = write_target(tmp_path / "t", layer_tensors("model.", range(NUM_TARGET_LAYERS)))
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(TargetError, match="cannot be read"):
        copy_last_layers(make_drafter(), target, TARGET)
    weights.unlink()
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.layers.4.self_attn.q_proj.weight": "gone.safetensors"}})
    )
    with pytest.raises(TargetError, match=r"gone\.safetensors"):
        copy_last_layers(make_drafter(), target, TARGET)


@pytest.mark.parametrize("adds_one", [False, True])
def test_the_last_norm_starts_as_what_the_targets_norm_multiplies_by(adds_one: bool) -> None:
    weight = torch.linspace(0.5, 3.0, 16)
    table = torch.zeros(64, 16)
    drafter = make_drafter()
    use_target_norm(
        drafter,
        TargetParts(embedding=table, lm_head=table, norm_weight=weight, norm_eps=1e-6, norm_adds_one=adds_one),
    )
    assert torch.equal(drafter.norm.weight, weight + 1 if adds_one else weight)


@pytest.mark.parametrize("taps", [(1, 2), (2, 1)])
def test_context_rows_start_as_the_deepest_tap_normed_for_the_first_draft_layer(taps: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    rms = torch.rand(2 * 16, generator=generator) * 20 + 0.1  # channels of very different size
    features = torch.randn(200, 2 * 16, generator=generator) * rms
    drafter = make_drafter(taps=taps)
    with torch.no_grad():
        drafter.draft_layers()[0].input_layernorm.weight.copy_(torch.rand(16, generator=generator) + 0.5)
    read_deepest_tap(drafter, 1 / rms)
    channels = {tap: slice(16 * i, 16 * i + 16) for i, tap in enumerate(taps)}
    deepest = features[:, channels[2]]
    expected = (
        deepest * deepest.square().mean(-1, keepdim=True).rsqrt() * drafter.draft_layers()[0].input_layernorm.weight
    )
    similarity = torch.nn.functional.cosine_similarity(drafter.context(features / rms), expected, dim=-1)
    assert float(similarity.detach().mean()) > 0.98
    other = features.clone()
    other[:, channels[1]] = 0
    assert not torch.equal(drafter.context(other / rms), drafter.context(features / rms)), "the other taps take part"
