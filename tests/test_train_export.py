"""Exported drafters: names, keys, round trips, and the same numbers in the public `dflash` package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from cache_tools.errors import CheckpointError
from train.attention import BlockLayout
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.export import export_drafter, fold_feature_scale, load_drafter
from train.zlab_format import config_from_json, config_json

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 9


def tiny_config(*layer_types: str, **changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 101,
        "block_size": 5,
        "mask_token_id": 100,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
        "rope_theta": 10000.0,
        "layer_types": layer_types,
        "sliding_window": WINDOW if SLIDING in layer_types else None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return DrafterConfig(**{**values, **changes})


def tiny_drafter(*layer_types: str) -> DFlashDrafter:
    """Weights large enough that attention is far from uniform; norms far from one; all exact in bfloat16."""
    drafter = DFlashDrafter(tiny_config(*layer_types), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.ndim == 2 else 1 + noise * 0.3)
            parameter.copy_(parameter.bfloat16())
    return drafter


def test_files_hold_exactly_the_published_tensor_names_in_bfloat16(tmp_path: Path) -> None:
    export_drafter(tiny_drafter(FULL, FULL, FULL, FULL, FULL), tmp_path / "d")
    weights = load_file(tmp_path / "d" / "model.safetensors")
    per_layer = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    per_layer += [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    names = {f"layers.{i}.{name}.weight" for i in range(5) for name in per_layer}
    assert weights.keys() == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(weights) == 58 and {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "d", "model.safetensors"]


def test_config_has_exactly_the_keys_of_the_contract() -> None:
    plain = config_json(tiny_config(SLIDING, FULL))
    keys = """architectures model_type block_size dflash_config num_target_layers hidden_size intermediate_size
        num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps vocab_size
        max_position_embeddings rope_theta rope_scaling attention_bias attention_dropout tie_word_embeddings
        layer_types use_sliding_window sliding_window max_window_layers dtype eos_token_id pad_token_id"""
    assert plain.keys() == set(keys.split())
    assert plain["dflash_config"] == {"mask_token_id": 100, "target_layer_ids": [1, 3]}
    assert plain["architectures"] == ["DFlashDraftModel"] and plain["rope_scaling"] is None


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, SLIDING, FULL), (SLIDING,)])
def test_transformers_keeps_layer_types_window_and_theta(tmp_path: Path, layer_types: tuple[str, ...]) -> None:
    config = tiny_config(*layer_types)
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    read: Any = Qwen3Config.from_pretrained(tmp_path)
    assert tuple(read.layer_types) == layer_types and read.sliding_window == config.sliding_window
    assert read.rope_parameters["rope_theta"] == config.rope_theta
    assert read.rope_parameters["rope_type"] == "default"
    read.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config_from_json(again, tmp_path) == config


def test_loading_gives_back_the_same_drafter(tmp_path: Path) -> None:
    drafter = tiny_drafter(SLIDING, FULL)
    export_drafter(drafter, tmp_path / "d")
    loaded = load_drafter(tmp_path / "d", dtype=torch.float32)
    assert loaded.config == drafter.config
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    export_drafter(drafter, tmp_path / "d")  # an earlier export is replaced
    assert load_drafter(tmp_path / "d").fc.weight.dtype == torch.bfloat16


def test_folding_the_feature_scale_leaves_the_context_as_it_was() -> None:
    drafter = tiny_drafter(FULL)
    features, scale = torch.randn(7, 64), torch.rand(64) + 0.5
    before = drafter.context(features * scale)
    fold_feature_scale(drafter, scale)
    torch.testing.assert_close(drafter.context(features), before)


def test_block_size_inside_dflash_config_and_end_token_lists_are_read() -> None:
    config = tiny_config(FULL)
    plain = config_json(config)
    plain["dflash_config"]["block_size"] = plain.pop("block_size")
    plain |= {"eos_token_id": [2, 7], "sliding_window": 4096}
    assert config_from_json(plain, Path("x")) == config


def drop_tensor(weights: dict[str, Tensor], plain: dict[str, Any]) -> None:
    del weights["layers.0.self_attn.q_norm.weight"]


def add_tensor(weights: dict[str, Tensor], plain: dict[str, Any]) -> None:
    weights["lm_head.weight"] = torch.zeros(2)


def resize_tensor(weights: dict[str, Tensor], plain: dict[str, Any]) -> None:
    weights["fc.weight"] = torch.zeros(2, 2)


def lose_mask_token(weights: dict[str, Tensor], plain: dict[str, Any]) -> None:
    del plain["dflash_config"]["mask_token_id"]


def change_causality(weights: dict[str, Tensor], plain: dict[str, Any]) -> None:
    plain["is_causal"] = False


def contradict(weights: dict[str, Tensor], plain: dict[str, Any]) -> None:
    plain["layer_types"] = [FULL]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (drop_tensor, "layers.0.self_attn.q_norm.weight: missing"),
        (add_tensor, "no such tensor"),
        (resize_tensor, "fc.weight"),
        (lose_mask_token, "mask_token_id"),
        (change_causality, "is_causal"),
        (contradict, "layer_types"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, damage: Callable[[dict[str, Tensor], dict[str, Any]], None], named: str
) -> None:
    folder = tmp_path / "d"
    export_drafter(tiny_drafter(SLIDING, FULL), folder)
    weights, plain = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    damage(weights, plain)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(plain))
    with pytest.raises(CheckpointError, match=named):
        load_drafter(folder)


def test_torn_weights_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    export_drafter(tiny_drafter(FULL), folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="cannot read the drafter"):
        load_drafter(folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not an exported drafter"):
        export_drafter(tiny_drafter(FULL), folder)
    assert (folder / "notes.txt").read_text() == "mine"


def public_forward(folder: Path, features: Tensor, block_embeds: Tensor) -> Tensor:
    """Normed hidden states [B, H] of one block after context features [T, F * H], by the public package."""
    model_code = pytest.importorskip("dflash.model")
    model = model_code.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    num_rows, block_size = features.shape[0], block_embeds.shape[0]
    with torch.no_grad():
        output: Tensor = model(
            position_ids=torch.arange(num_rows + block_size)[None],
            noise_embedding=block_embeds[None],
            target_hidden=features[None],
        )
    return output[0]


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, SLIDING, FULL)])
@pytest.mark.parametrize("num_rows", [1, 4, WINDOW - 1, WINDOW, 40])
def test_public_dflash_package_computes_the_same(tmp_path: Path, layer_types: tuple[str, ...], num_rows: int) -> None:
    """Its sliding layers are causal in the block and see exactly `sliding_window` positions, as ours."""
    drafter = tiny_drafter(*layer_types)
    export_drafter(drafter, tmp_path / "d")
    generator = torch.Generator().manual_seed(num_rows)
    features = torch.randn(num_rows, 64, generator=generator)
    block_embeds = torch.randn(5, 32, generator=generator)
    layout = BlockLayout(torch.tensor([num_rows]), torch.tensor([0, num_rows + 1]), 5)
    padded = torch.cat([features, torch.full((1, 64), 1e3)])  # the anchor's own features, not to be seen
    with torch.no_grad():
        ours = drafter(block_embeds[None], drafter.context(padded), layout)[0]
    theirs = public_forward(tmp_path / "d", features, block_embeds)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
