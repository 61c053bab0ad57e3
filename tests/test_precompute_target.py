"""The target engine against transformers' own hidden states, for dense and hybrid models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from precompute_cases import VOCAB_SIZE, Kind, make_config, make_target
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from cache_tools.codecs import bf16_to_float32
from cache_tools.errors import TargetError
from precompute import fingerprints
from precompute.target import Target, _norm_kind
from precompute.transfer import HostCopier

KINDS: list[Kind] = ["llama", "qwen3", "hybrid"]
CPU = torch.device("cpu")


def load(folder: Path, layer_ids: tuple[int, ...] = (0, 2), dtype: str = "bfloat16", attention: str = "sdpa") -> Target:
    return Target.load(folder, layer_ids=layer_ids, dtype=dtype, attention=attention, device=CPU)


def random_batch(lengths: tuple[int, ...]) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB_SIZE, n, dtype=np.int32) for n in lengths]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), request.param)


@pytest.mark.parametrize("lengths", [(9, 9), (5, 70, 33)])
@torch.inference_mode()
def test_kept_layers_are_transformers_hidden_states_bit_for_bit(folder: Path, lengths: tuple[int, ...]) -> None:
    batch = random_batch(lengths)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = nn.utils.rnn.pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in batch], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in batch], batch_first=True)
    expected = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
    got = load(folder).hidden_states(batch)
    assert len(got) == 2
    for hidden, layer_id in zip(got, (0, 2), strict=True):
        rows = torch.cat([expected[layer_id + 1][i, :n] for i, n in enumerate(lengths)])
        assert rows.std() > 0.01
        assert torch.equal(hidden, rows)


@torch.inference_mode()
def test_the_last_layer_is_kept_before_the_final_norm(folder: Path) -> None:
    batch = random_batch((12,))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(batch[0].astype(np.int64))[None]
    after_norm = model(ids, output_hidden_states=True, use_cache=False).hidden_states[-1][0]
    (before_norm,) = load(folder, (3,), "float32").hidden_states(batch)
    assert not torch.allclose(before_norm.float(), after_norm, rtol=0.05)
    torch.testing.assert_close(model.model.norm(before_norm.float()), after_norm, rtol=0.05, atol=0.05)


@torch.inference_mode()
def test_a_padded_batch_gives_what_each_sample_gives_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rounding to bfloat16 would hide a small leak, so the hooks keep float32 here.
    monkeypatch.setattr("precompute.target.KEPT_DTYPE", torch.float32)
    target, batch = load(folder, (0, 3), "float32"), random_batch((1, 5, 33, 64, 70))
    together = target.hidden_states(batch)
    for index, row in enumerate(batch):
        first = sum(len(other) for other in batch[:index])
        for layer, alone in zip(together, target.hidden_states([row]), strict=True):
            assert layer.dtype == torch.float32
            difference = (layer[first : first + len(row)] - alone).norm() / alone.norm()
            assert difference < 1e-4


def test_layers_behind_the_last_kept_one_do_not_run(folder: Path) -> None:
    target = load(folder, (0, 1))
    ran: list[int] = []
    for index, layer in enumerate(target._layers):
        layer.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    target.hidden_states(random_batch((4, 7)))
    assert ran == [0, 1]


def test_eager_attention_agrees_with_sdpa(folder: Path) -> None:
    batch = random_batch((5, 20))
    for a, b in zip(
        load(folder).hidden_states(batch), load(folder, attention="eager").hidden_states(batch), strict=True
    ):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.02)


def test_flash_attention_is_refused_by_name_where_it_is_not_installed(folder: Path) -> None:
    with pytest.raises(TargetError, match="flash-attn"):
        load(folder, attention="flash_attention_2")


@torch.inference_mode()
def test_stored_parts_reproduce_the_targets_logits(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(random_batch((12,))[0].astype(np.int64))[None]
    parts = load(folder).parts()
    assert (parts.lm_head is None) == model.config.tie_word_embeddings
    assert parts.norm_kind == ("one_plus_weight" if model.config.model_type == "qwen3_5_text" else "plain")
    assert parts.norm_eps == model.config.rms_norm_eps
    embedding = bf16_to_float32(parts.embed_tokens)
    head = embedding if parts.lm_head is None else bf16_to_float32(parts.lm_head)
    np.testing.assert_array_equal(embedding, model.get_input_embeddings().weight.numpy())
    (hidden,) = load(folder, (3,), "float32").hidden_states([ids[0].numpy().astype(np.int32)])
    normed = hidden.float() * torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + parts.norm_eps)
    weight = torch.from_numpy(bf16_to_float32(parts.final_norm))
    normed = normed * (weight if parts.norm_kind == "plain" else 1 + weight)
    expected = model(ids, use_cache=False).logits[0]
    torch.testing.assert_close(normed @ torch.from_numpy(head).T, expected, rtol=0.05, atol=0.05)


def test_a_float32_target_gives_float32_parts(folder: Path) -> None:
    parts = load(folder, dtype="float32").parts()
    assert parts.embed_tokens.dtype == parts.final_norm.dtype == np.float32


def test_a_scaling_embedding_is_stored_as_what_it_returns(folder: Path) -> None:
    target = load(folder)
    plain = bf16_to_float32(target.parts().embed_tokens)
    target._model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output * 2)
    parts = target.parts()
    np.testing.assert_array_equal(bf16_to_float32(parts.embed_tokens), 2 * plain)
    assert parts.lm_head is not None  # even where the weights are shared, the head is no longer the embedding


def test_a_norm_of_another_kind_is_refused() -> None:
    norm = nn.LayerNorm(32)
    with torch.no_grad():
        norm.weight.add_(torch.randn(32))
    with pytest.raises(TargetError, match="unknown kind"):
        _norm_kind(norm)


def test_missing_weights_are_refused_and_named(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


@pytest.mark.parametrize("kept_bytes", [0, 3000])
def test_damaged_weight_files_are_a_target_error(kept_bytes: int, tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(TargetError, match="cannot load"):
        load(folder)


def test_the_layers_of_a_multimodal_wrapper_are_found(tmp_path: Path) -> None:
    text = make_config("hybrid").to_dict()
    vision = {"depth": 4, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    model: Any = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    target = load(tmp_path)
    assert len(target._layers) == 4
    assert [tuple(h.shape) for h in target.hidden_states(random_batch((5, 9)))] == [(14, 32), (14, 32)]


def test_host_copies_on_the_cpu_are_the_same_bits() -> None:
    layers = [torch.randn(5, 8).to(torch.bfloat16) for _ in range(2)]
    copier = HostCopier(CPU, max_tokens=5)
    for got, layer in zip(copier.start(layers).wait(), layers, strict=True):
        np.testing.assert_array_equal(bf16_to_float32(got), layer.float().numpy())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_host_copies_from_a_gpu_are_the_same_bits_while_it_computes_on() -> None:
    device = torch.device("cuda:0")
    copier = HostCopier(device, max_tokens=4096)
    for seed in range(8):
        generator = torch.Generator(device).manual_seed(seed)
        layers = [
            torch.randn((4096 - seed, 512), device=device, generator=generator).to(torch.bfloat16) for _ in range(2)
        ]
        expected = [layer.cpu() for layer in layers]
        pending = copier.start(layers)
        del layers
        torch.randn((4096, 4096), device=device).mm(torch.randn((4096, 4096), device=device))
        for got, layer in zip(pending.wait(), expected, strict=True):
            np.testing.assert_array_equal(bf16_to_float32(got), layer.float().numpy())
        pending.release()


def test_fingerprints_ignore_who_wrote_a_file_and_see_what_is_in_it(tmp_path: Path) -> None:
    folder = make_target(tmp_path, weights=False)
    config, tokenizer = fingerprints.config_sha256(folder), fingerprints.tokenizer_sha256(folder)
    for name in ("config.json", "tokenizer_config.json"):
        value = json.loads((folder / name).read_text())
        value = {"transformers_version": "9.9", **dict(reversed(value.items()))}
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text("another template")
    assert fingerprints.config_sha256(folder) == config
    assert fingerprints.tokenizer_sha256(folder) == tokenizer
    value = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**value, "rms_norm_eps": 0.5}))
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    assert fingerprints.config_sha256(folder) != config
    assert fingerprints.tokenizer_sha256(folder) != tokenizer


def test_the_weights_fingerprint_sees_one_byte_in_any_file_and_not_the_number_of_threads(tmp_path: Path) -> None:
    for index in range(5):
        (tmp_path / f"model-{index}.safetensors").write_bytes(bytes([index]) * 1000)
    before = fingerprints.weights_sha256(tmp_path, num_threads=1)
    assert fingerprints.weights_sha256(tmp_path, num_threads=4) == before
    with (tmp_path / "model-3.safetensors").open("r+b") as file:
        file.seek(500)
        file.write(b"\xff")
    assert fingerprints.weights_sha256(tmp_path, num_threads=4) != before
