"""The three checkpoint formats: what each says, that they turn into each other without loss, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_train_export import FULL, SLIDING, tiny_config, tiny_drafter
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, Qwen3Config

from cache_tools.errors import CheckpointError, ConfigError, TargetError
from train import speculators_format, zlab_format
from train.attention import BlockLayout
from train.cli import main
from train.decoding import SpeculativeDecoder
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.evaluate import target_parts
from train.export import Format, export_drafter, load_drafter
from train.loading import load_any_drafter
from train.target_folder import TargetFolder

HERE = Path("x")
Change = Callable[[dict[str, Any]], object]


def llama(vocab_size: int = 101, *, tied: bool = False, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=vocab_size, bos_token_id=None, eos_token_id=None, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.eval()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "t"
    llama().bfloat16().save_pretrained(path)
    return path


def call(*arguments: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def read_json(folder: Path) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return plain


def change(folder: Path, edit: Change) -> None:
    plain = read_json(folder)
    edit(plain)
    (folder / "config.json").write_text(json.dumps(plain))


@st.composite
def configs(draw: st.DrawFn) -> DrafterConfig:
    layer_types = tuple(draw(st.lists(st.sampled_from([FULL, SLIDING]), min_size=1, max_size=4)))
    num_target_layers = draw(st.integers(3, 40))
    taps = st.lists(st.integers(0, num_target_layers - 2), min_size=1, max_size=5, unique=True)
    return tiny_config(
        *layer_types,
        block_size=draw(st.integers(2, 9)),
        mask_token_id=draw(st.integers(3, 100)),
        target_layer_ids=tuple(draw(taps)),
        num_target_layers=num_target_layers,
        rope_theta=draw(st.sampled_from([1e4, 1e6, 1e7])),
        max_position_embeddings=draw(st.sampled_from([2048, 32768, 262144])),
        eos_token_id=draw(st.sampled_from([None, 0, 2])),
        pad_token_id=draw(st.sampled_from([None, 1])),
    )


@given(config=configs())
def test_every_config_survives_both_formats(config: DrafterConfig) -> None:
    zlab = json.loads(json.dumps(zlab_format.config_json(config)))
    assert zlab_format.config_from_json(zlab, HERE) == config
    target = TargetFolder(Path("/t"), {"architectures": ["A"]})
    speculators = json.loads(json.dumps(speculators_format.config_json(config, target)))
    assert speculators_format.config_from_json(speculators, HERE) == config
    assert speculators["aux_hidden_state_layer_ids"] == [i + 1 for i in zlab["dflash_config"]["target_layer_ids"]]


@given(config=configs())
def test_the_layers_settings_survive_qwen3_config_in_both_formats(config: DrafterConfig) -> None:
    written = speculators_format.config_json(config, TargetFolder(Path("/t"), {}))
    for plain in (zlab_format.config_json(config), written["transformer_layer_config"]):
        read: Any = Qwen3Config.from_dict(plain)
        again = read.to_diff_dict()
        assert again["layer_types"] == list(config.layer_types)
        assert again["sliding_window"] == config.sliding_window
        assert again["use_sliding_window"] == (config.sliding_window is not None)
        assert again["rope_parameters"] == {"rope_theta": config.rope_theta, "rope_type": "default"}
    nested = speculators_format.config_from_json(written | {"transformer_layer_config": again}, HERE)
    assert nested == config


@pytest.mark.parametrize("use", [True, False])
@pytest.mark.parametrize("window", [7, None])
@pytest.mark.parametrize("first", [0, 2, 3, 28])
def test_missing_layer_types_are_what_qwen3_config_makes_of_them(use: bool, window: int | None, first: int) -> None:
    plain = zlab_format.config_json(tiny_config(FULL, FULL, FULL))
    plain |= {"use_sliding_window": use, "sliding_window": window, "max_window_layers": first}
    del plain["layer_types"]
    read: Any = Qwen3Config.from_dict(dict(plain))
    config = zlab_format.config_from_json(plain, HERE)
    assert config.layer_types == tuple(read.layer_types)
    assert config.sliding_window == (read.sliding_window if SLIDING in read.layer_types else None)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, FULL), (SLIDING,)])
def test_going_through_speculators_and_back_gives_the_same_files(
    tmp_path: Path, layer_types: tuple[str, ...], tied: bool
) -> None:
    llama(tied=tied).bfloat16().save_pretrained(tmp_path / "t")
    export_drafter(tiny_drafter(*layer_types), tmp_path / "z")
    given = ("--format", "speculators", "--target", tmp_path / "t")
    number = 11 * len(layer_types) + 3
    said = call("export", "--run", tmp_path / "z", "--out", tmp_path / "s", *given)
    assert said == f"exported {number + 2} tensors to {tmp_path / 's'}\n"
    assert call("import", "--from", tmp_path / "s", "--out", tmp_path / "back").startswith(f"imported {number} tensors")
    call("import", "--from", tmp_path / "z", "--out", tmp_path / "z2", "--target", tmp_path / "t")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "z2" / name).read_bytes() == (tmp_path / "z" / name).read_bytes()
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "z" / name).read_bytes()
    call("export", "--run", tmp_path / "s", "--out", tmp_path / "s2", *given)  # eval, export and import read all alike
    assert (tmp_path / "s2" / "config.json").read_bytes() == (tmp_path / "s" / "config.json").read_bytes()
    held, model = load_file(tmp_path / "s" / "model.safetensors"), llama(tied=tied).bfloat16()
    assert torch.equal(held["embed_tokens.weight"], model.model.embed_tokens.weight)
    assert torch.equal(held["lm_head.weight"], model.lm_head.weight)
    assert torch.equal(held["lm_head.weight"], held["embed_tokens.weight"]) == tied


def test_checkpoints_in_float32_are_not_rounded_on_reading(tmp_path: Path) -> None:
    drafter = tiny_drafter(FULL)
    export_drafter(drafter, tmp_path / "d")
    exact = {name: tensor + 1e-4 for name, tensor in drafter.state_dict().items()}
    save_file(exact, tmp_path / "d" / "model.safetensors")
    assert all(
        torch.equal(tensor, exact[name]) for name, tensor in load_any_drafter(tmp_path / "d").state_dict().items()
    )


def test_a_drafter_split_over_files_is_read_through_its_index(tmp_path: Path) -> None:
    drafter = tiny_drafter(FULL)
    export_drafter(drafter, tmp_path / "d")
    weights = load_file(tmp_path / "d" / "model.safetensors")
    (tmp_path / "d" / "model.safetensors").unlink()
    weight_map = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(weights)}
    for part in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == part}, tmp_path / "d" / part)
    (tmp_path / "d" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = load_any_drafter(tmp_path / "d").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in drafter.state_dict().items())
    (tmp_path / "d" / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot read the drafter"):
        load_any_drafter(tmp_path / "d")


@pytest.mark.parametrize(
    ("layer_types", "value", "taken"),
    [
        ((FULL, FULL), False, True),
        ((FULL, FULL), True, False),
        ((SLIDING, FULL), False, False),
        ((SLIDING, FULL), True, False),
        ((SLIDING,), False, False),
        ((SLIDING,), True, True),
    ],
)
@pytest.mark.parametrize("key", ["is_causal", "causal"])
def test_causality_of_all_layers_is_taken_only_where_it_changes_nothing(
    layer_types: tuple[str, ...], value: bool, taken: bool, key: str
) -> None:
    config = tiny_config(*layer_types)
    plain = zlab_format.config_json(config)
    (plain if key == "is_causal" else plain["dflash_config"])[key] = value
    if taken:
        assert zlab_format.config_from_json(plain, HERE) == config
    else:
        with pytest.raises(CheckpointError, match=rf"\b{key} {value}"):
            zlab_format.config_from_json(plain, HERE)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda c: c.update(use_sliding_window=False), "use_sliding_window False"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act 'gelu'"),
        (lambda c: c.update(attention_bias=True), "attention_bias True"),
        (lambda c: c.update(mlp_bias=True), "mlp_bias True"),
        (lambda c: c.update(partial_rotary_factor=0.25), "partial_rotary_factor 0.25"),
        (lambda c: c.update(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5"),
        (lambda c: c.update(rope_parameters={"rope_type": "yarn"}), "rope_parameters.rope_type 'yarn'"),
        (lambda c: c.update(rope_scaling={"factor": 2}), "rope_scaling"),
        (lambda c: c["dflash_config"].update(block_size=8), r"block_size \[5, 8\]"),
        (lambda c: c["dflash_config"].update(conv_kernel_size=2), "conv_kernel_size 2"),
        (lambda c: c.update(selector_rank=4, selector_top_k=16), "selector_rank 4, selector_top_k 16"),
        (lambda c: c.pop("num_target_layers"), "num_target_layers"),
    ],
)
def test_zlab_settings_that_are_not_followed_are_refused_by_name(edit: Change, named: str) -> None:
    plain = zlab_format.config_json(tiny_config(SLIDING, FULL))
    edit(plain)
    with pytest.raises(CheckpointError, match=named):
        zlab_format.config_from_json(plain, HERE)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda c: c.update(speculators_model_type="dspark"), "speculators_model_type 'dspark'"),
        (lambda c: c.update(sample_from_anchor=True), "sample_from_anchor True"),
        (lambda c: c.update(draft_vocab_size=32), "draft_vocab_size 32"),
        (lambda c: c.update(sliding_window_non_causal=True), "sliding_window_non_causal True"),
        (lambda c: c.update(aux_hidden_state_layer_ids=[0, 2]), r"aux_hidden_state_layer_ids \[0, 2\]"),
        (lambda c: c.update(aux_hidden_state_layer_ids=[2, 6]), r"aux_hidden_state_layer_ids \[2, 6\]"),
        (lambda c: c.update(aux_hidden_state_layer_ids=None), "target_layer_ids"),
        (lambda c: c.update(mask_token_id=None), "mask_token_id"),
        (lambda c: c.pop("num_target_layers"), "(?s)num_target_layers.*--target"),
        (lambda c: c.pop("transformer_layer_config"), "hidden_size"),
        (lambda c: c["transformer_layer_config"].update(use_sliding_window=False), "use_sliding_window False"),
        (lambda c: c["transformer_layer_config"].update(hidden_act="gelu"), "hidden_act 'gelu'"),
    ],
)
def test_speculators_settings_that_are_not_followed_are_refused_by_name(edit: Change, named: str) -> None:
    target = TargetFolder(Path("/t"), {})
    plain = speculators_format.config_json(tiny_config(SLIDING, FULL), target)
    plain = json.loads(json.dumps(plain))
    edit(plain)
    with pytest.raises(CheckpointError, match=named):
        speculators_format.config_from_json(plain, HERE)


def test_layers_that_all_see_the_whole_block_are_marked_so_and_read_either_way() -> None:
    """Engines turn `sliding_window_non_causal` false into causal attention on every layer."""
    config = tiny_config(FULL, FULL)
    plain = speculators_format.config_json(config, TargetFolder(Path("/t"), {}))
    assert plain["sliding_window_non_causal"] is True
    assert speculators_format.config_from_json(plain | {"sliding_window_non_causal": False}, HERE) == config
    mixed = speculators_format.config_json(tiny_config(SLIDING, FULL), TargetFolder(Path("/t"), {}))
    assert mixed["sliding_window_non_causal"] is False


def test_a_speculators_checkpoint_without_the_number_of_target_layers_is_imported_with_the_target(
    tmp_path: Path, target: Path
) -> None:
    drafter = tiny_drafter(SLIDING, FULL)
    export_drafter(drafter, tmp_path / "s", format="speculators", target=TargetFolder.open(target))
    change(tmp_path / "s", lambda c: c.pop("num_target_layers"))
    assert "--target TARGET" in call("import", "--from", tmp_path / "s", "--out", tmp_path / "d", exit_code=1)
    call("import", "--from", tmp_path / "s", "--out", tmp_path / "d", "--target", target)
    assert load_drafter(tmp_path / "d").config == drafter.config
    change(tmp_path / "s", lambda c: c.update(num_target_layers=7))
    said = call("import", "--from", tmp_path / "s", "--out", tmp_path / "e", "--target", target, exit_code=1)
    assert "num_target_layers 7" in said and not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda c: c.update(hidden_size=64), "hidden_size 64"),
        (lambda c: c.update(vocab_size=7), "vocab_size 7"),
        (lambda c: c.update(num_hidden_layers=8), "num_hidden_layers 8"),
    ],
)
@pytest.mark.parametrize("format", ["z-lab", "speculators", "transformers"])
def test_another_target_is_refused_by_what_differs(
    tmp_path: Path, target: Path, edit: Change, named: str, format: Format
) -> None:
    shutil.copytree(target, tmp_path / "t")
    change(tmp_path / "t", edit)
    opened = TargetFolder.open(tmp_path / "t")
    with pytest.raises(TargetError, match=named):
        export_drafter(tiny_drafter(FULL), tmp_path / "d", format=format, target=opened)
    assert not (tmp_path / "d").exists()


def test_targets_without_usable_weights_or_none_at_all_are_named(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match="--target"):
        export_drafter(tiny_drafter(FULL), tmp_path / "d", format="speculators")
    with pytest.raises(TargetError, match="no target model here"):
        TargetFolder.open(tmp_path)
    shutil.copytree(target, tmp_path / "t")
    weights = load_file(target / "model.safetensors")
    opened = TargetFolder.open(tmp_path / "t")
    for name, said in (("lm_head.weight", "cannot be read"), ("model.embed_tokens.weight", "embed_tokens.weight")):
        save_file({n: tensor for n, tensor in weights.items() if n != name}, tmp_path / "t" / "model.safetensors")
        with pytest.raises(TargetError, match=said):
            export_drafter(tiny_drafter(FULL), tmp_path / "d", format="speculators", target=opened)
    save_file(weights | {"lm_head.weight": torch.zeros(3, 32)}, tmp_path / "t" / "model.safetensors")
    with pytest.raises(TargetError, match="another shape"):
        export_drafter(tiny_drafter(FULL), tmp_path / "d", format="speculators", target=opened)


@pytest.mark.parametrize(
    ("format", "config", "named"),
    [
        ("transformers", tiny_config(SLIDING, FULL), "layer_types"),
        ("transformers", tiny_config(FULL, target_layer_ids=(1, 5)), r"target_layer_ids \[1, 5\]"),
        ("speculators", tiny_config(FULL, target_layer_ids=(1, 5)), r"aux_hidden_state_layer_ids \[2, 6\]"),
    ],
)
def test_drafters_that_a_format_cannot_hold_are_refused_by_name(
    tmp_path: Path, target: Path, format: Format, config: DrafterConfig, named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        export_drafter(DFlashDrafter(config), tmp_path / "d", format=format, target=TargetFolder.open(target))
    assert not (tmp_path / "d").exists()


def test_an_export_replaces_one_of_another_format_and_transformers_ones_are_not_read(
    tmp_path: Path, target: Path
) -> None:
    drafter = tiny_drafter(FULL)
    formats: tuple[Format, ...] = ("z-lab", "transformers", "speculators", "transformers")
    for format in formats:
        export_drafter(drafter, tmp_path / "d", format=format, target=TargetFolder.open(target))
    with pytest.raises(CheckpointError, match=r"(?s)only written.*--format z-lab"):
        load_drafter(tmp_path / "d")


def transformers_drafter(drafter: DFlashDrafter, folder: Path) -> Any:
    export_drafter(drafter, folder, format="transformers")
    model, report = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_the_class_of_transformers_computes_the_same(tmp_path: Path, num_rows: int) -> None:
    drafter = tiny_drafter(FULL, FULL)
    model = transformers_drafter(drafter, tmp_path / "d")
    generator = torch.Generator().manual_seed(num_rows)
    features = torch.randn(num_rows, 64, generator=generator)
    block_embeds = torch.randn(5, 32, generator=generator)
    layout = BlockLayout(torch.tensor([num_rows]), torch.tensor([0, num_rows + 1]), 5)
    padded = torch.cat([features, torch.full((1, 64), 1e3)])  # the anchor's own features, not to be seen
    with torch.no_grad():
        ours = drafter(block_embeds[None], drafter.context(padded), layout)[0]
        theirs = model(noise_embeds=block_embeds[None], context_hidden_states=features[None]).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("vocab_size", "seed"), [(5, 4), (7, 2), (11, 1)])
def test_transformers_own_speculative_generation_gives_the_same_text_in_as_many_steps_as_ours(
    tmp_path: Path, vocab_size: int, seed: int
) -> None:
    """Few tokens, so that even a random drafter is right now and then; large weights, so that its drafts hang on what
    it is shown: from the layers beside its taps it would draft something else."""
    target = llama(vocab_size, seed=seed)
    tokens = {"vocab_size": vocab_size, "mask_token_id": vocab_size - 1, "eos_token_id": None, "pad_token_id": None}
    drafter = DFlashDrafter(tiny_config(FULL, FULL, **tokens), seed=seed).eval()
    large = {name: tensor * 15 if tensor.ndim == 2 else tensor for name, tensor in drafter.state_dict().items()}
    drafter.load_state_dict({name: tensor.bfloat16().float() for name, tensor in large.items()})
    assistant = transformers_drafter(drafter, tmp_path / "d")
    prompt = torch.randint(0, vocab_size, (1, 10), generator=torch.Generator().manual_seed(seed))
    options: dict[str, Any] = {
        "max_new_tokens": 60, "do_sample": False, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0,
    }  # fmt: skip
    passes: list[int] = []
    plain: Any = target.generate(prompt, **options)
    with target.register_forward_hook(lambda *_: passes.append(1)):
        theirs: Any = target.generate(prompt, assistant_model=assistant, speculation_type="dflash", **options)
    ours = SpeculativeDecoder(target, drafter, target_parts(target)).decode(prompt[0], max_new_tokens=60, stop_ids=())
    assert theirs.tolist() == plain.tolist()
    assert ours.tokens == plain[0, 10:].tolist()
    assert len(passes) == 1 + len(ours.acceptance_lengths) < 60
    change(tmp_path / "d", lambda c: c.update(target_layer_ids=[i + 1 for i in c["target_layer_ids"]]))
    shifted: Any = AutoModel.from_pretrained(tmp_path / "d", dtype=torch.float32)
    passes.clear()
    with target.register_forward_hook(lambda *_: passes.append(1)):
        target.generate(prompt, assistant_model=shifted.eval(), speculation_type="dflash", **options)
    assert len(passes) != 1 + len(ours.acceptance_lengths), "this test cannot tell one layer from the next"
