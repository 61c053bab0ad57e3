"""The report's arithmetic on hand-made answers, and what is said about prompts that cannot be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from precompute_cases import STRIPS_THINKING, VOCAB_SIZE, chat, chats, make_target, write_jsonl
from test_precompute_tokenizing import one, supervised
from test_train_decoding import tiny_target

from cache_tools.errors import CheckpointError, ConfigError, DataError, TargetError
from train import evaluate as module
from train.config import EvalConfig
from train.decoding import Decoded, SpeculativeDecoder
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.evaluate import describe, evaluate
from train.export import export_drafter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("evaluate") / "target", "qwen3")


@pytest.fixture(scope="module")
def drafter(target: Path) -> Path:
    config = json.loads((target / "config.json").read_text())
    shape = DrafterConfig.for_target(
        config, num_layers=1, block_size=4, mask_token_id=VOCAB_SIZE - 1, target_layer_ids=(0, 2)
    )
    export_drafter(DFlashDrafter(shape), target.parent / "drafter")
    return target.parent / "drafter"


def make_config(target: Path, drafter: Path, *prompts: Path, **changes: Any) -> EvalConfig:
    values: dict[str, Any] = {"max_new_tokens": 6, "device": "cpu", "threads": 1, **changes}
    return EvalConfig(target=target, drafter=drafter, prompts=prompts, **values)


def any_config(**changes: Any) -> EvalConfig:
    return make_config(Path("t"), Path("d"), Path("p"), **changes)


def answer(tokens: list[int], steps: list[int], seconds: float, counts: tuple[list[int], ...] = ()) -> Decoded:
    proposed, reached, accepted = counts or ([0] * 3,) * 3
    return Decoded(
        tokens=tokens, acceptance_lengths=steps, proposed_at=proposed, reached_at=reached, accepted_at=accepted,
        prefill_seconds=100.0, target_seconds=seconds * 0.75, drafter_seconds=seconds * 0.25,
    )  # fmt: skip


def test_means_over_requests_and_over_steps_differ_as_they_should() -> None:
    long = answer(list(range(10)), [3, 3, 3], 2.0, ([3, 3, 3], [3, 3, 2], [3, 2, 1]))
    short = answer([5, 6], [1], 1.0, ([1, 1, 1], [1, 0, 0], [0, 0, 0]))
    ended_at_once = answer([2], [], 0.0)
    plain = [answer(list(range(10)), [1] * 9, 6.0), answer([5, 7], [1], 4.0), answer([2], [], 0.0)]
    report = module._report(any_config(), 4, [long, short, ended_at_once], plain)
    assert (report["num_prompts"], report["num_tokens"], report["block_size"]) == (3, 13, 4)
    assert report["acceptance_length"] == pytest.approx((3 + 1) / 2)
    assert report["acceptance_length_pooled"] == pytest.approx(10 / 4)
    assert [slot["accepted"] for slot in report["by_position"]] == [3 / 4, 2 / 4, 1 / 4]
    assert [slot["conditional"] for slot in report["by_position"]] == [3 / 4, 2 / 3, 1 / 2]
    # The first token of an answer comes from the prompt's pass, whose time does not count.
    assert report["tokens_per_second"] == pytest.approx(10 / 3)
    assert report["plain_tokens_per_second"] == pytest.approx(1.0)
    assert report["speedup"] == pytest.approx(10 / 3)
    assert report["identical"] == 2
    assert "2 of 3 identical" in describe(report) and "2.000 (mean over answers), 2.500 (pooled)" in describe(report)


def test_slots_never_reached_have_no_share() -> None:
    report = module._report(any_config(), 4, [answer([1, 2], [1], 1.0, ([1, 0, 0], [1, 0, 0], [0, 0, 0]))], [])
    assert report["by_position"][1] == {"accepted": None, "conditional": None}
    assert (report["identical"], report["speedup"], report["plain_tokens_per_second"]) == (None, None, None)
    assert "identical" not in describe(report) and "1.0 tok/s" in describe(report)


@pytest.mark.parametrize("plain", [True, False])
def test_answers_of_one_token_have_neither_speed_nor_acceptance_length(
    target: Path, drafter: Path, tmp_path: Path, plain: bool
) -> None:
    prompts = write_jsonl(tmp_path / "p.jsonl", chats(2))
    report = evaluate(make_config(target, drafter, prompts, max_new_tokens=1, plain=plain))
    assert report["num_tokens"] == 2 and report["identical"] == (2 if plain else None)
    for name in ("acceptance_length", "acceptance_length_pooled", "tokens_per_second", "speedup"):
        assert report[name] is None
    assert "acceptance length  - (mean over answers)" in describe(json.loads(json.dumps(report)))


def test_the_prompt_ends_with_the_last_user_message(target: Path, drafter: Path, tmp_path: Path) -> None:
    system = {"role": "system", "content": "be good"}
    turns = [system, *chat("hello", "good day", "how are you", "never seen")["messages"]]
    whole = write_jsonl(tmp_path / "whole.jsonl", [{"messages": turns}])
    cut = write_jsonl(tmp_path / "cut.jsonl", [{"messages": turns[:-1]}])
    assert [messages for _, messages in module._rows(whole, None)] == [turns[:-1]]
    assert list(module._rows(cut, None)) == [(f"{cut}:1", turns[:-1])]


def test_every_file_gives_its_first_prompts(target: Path, drafter: Path, tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / name, chats(3)) for name in ("a.jsonl", "b.jsonl")]
    assert evaluate(make_config(target, drafter, *files, max_prompts=2))["num_prompts"] == 4


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "p.jsonl:3"),
        ("[1, 2]", "p.jsonl:3"),
        ('{"text": "hello"}', "p.jsonl:3"),
        ('{"messages": []}', "p.jsonl:3"),
        ('{"messages": [{"role": "assistant", "content": "hello"}]}', "p.jsonl:3"),
        ('{"messages": [{"role": "user"}]}', "p.jsonl:3"),
        ('{"messages": [{"role": "user", "content": ""}]}', "p.jsonl:3"),
        (json.dumps(chat("hello there " * 300, "x")), "positions"),
    ],
)
def test_a_row_that_is_no_prompt_is_named_before_anything_is_decoded(
    target: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(chats(1)[0]) + "\n\n" + line + "\n")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("decoded a prompt before all were read")

    monkeypatch.setattr(SpeculativeDecoder, "decode", never)
    with pytest.raises(DataError, match=said):
        evaluate(make_config(target, drafter, path))


def test_missing_and_empty_prompt_files_are_named_without_loading_the_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        evaluate(make_config(tmp_path, tmp_path, tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"empty\.jsonl"):
        evaluate(make_config(tmp_path, tmp_path, tmp_path / "empty.jsonl"))


def test_a_drafter_of_another_target_is_refused_by_what_differs(drafter: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", "qwen3", hidden_size=48)
    with pytest.raises(CheckpointError, match="hidden_size 32 against 48"):
        evaluate(make_config(other, drafter, write_jsonl(tmp_path / "p.jsonl", chats(1))))


def test_damaged_targets_and_drafters_are_messages(target: Path, drafter: Path, tmp_path: Path) -> None:
    prompts = write_jsonl(tmp_path / "p.jsonl", chats(1))
    shutil.copytree(target, tmp_path / "target")
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(TargetError, match="cannot be loaded"):
        evaluate(make_config(tmp_path / "target", drafter, prompts))
    shutil.copytree(drafter, tmp_path / "drafter")
    (tmp_path / "drafter" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an object"):
        evaluate(make_config(target, tmp_path / "drafter", prompts))


def test_every_end_token_of_the_target_ends_an_answer(target: Path, drafter: Path, tmp_path: Path) -> None:
    prompts = write_jsonl(tmp_path / "p.jsonl", chats(1))
    shutil.copytree(target, tmp_path / "target")
    long = evaluate(make_config(target, drafter, prompts, max_new_tokens=8))
    assert long["num_tokens"] == 8
    every = list(range(VOCAB_SIZE))
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": every}))
    report = evaluate(make_config(tmp_path / "target", drafter, prompts, max_new_tokens=8))
    assert report["num_tokens"] == report["identical"] == 1
    assert torch.is_inference_mode_enabled() is False


def test_template_arguments_reach_the_prompt(target: Path, drafter: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "target")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tail }}"
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "hello"}]
    loaded, tokenizer = module._load_target(tmp_path / "target", torch.device("cpu"), torch.float32)
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"messages": messages}])
    config = make_config(tmp_path / "target", drafter, prompts, max_new_tokens=1, template_args=('tail="bye"',))
    ids = module._prompt("here", messages, tokenizer, loaded, config)
    assert tokenizer.decode(ids) == "hellobye"


@pytest.mark.parametrize("thinks", [True, False])
def test_the_prompt_is_what_training_saw_before_the_answer_with_and_without_thinking(
    target: Path, drafter: Path, tmp_path: Path, thinks: bool
) -> None:
    """A drafter of answers without thinking is judged behind the empty block that switches it off, and the other way
    round; judged in the other mode it would look far worse than it is."""
    row = chat("hello", "good day")
    if thinks:
        row["messages"][1]["reasoning_content"] = "how are you"
    variables = {"enable_thinking": thinks}
    stored = one(STRIPS_THINKING, row, template_args=variables)
    (answer,) = supervised(STRIPS_THINKING, stored)
    assert ("<think>" in answer) == thinks
    shutil.copytree(target, tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text(STRIPS_THINKING)
    loaded, tokenizer = module._load_target(tmp_path / "target", torch.device("cpu"), torch.float32)
    prompts = write_jsonl(tmp_path / "p.jsonl", [row])
    ((where, messages),) = module._rows(prompts, None)
    ids = {}
    for value in (True, False):
        arguments = (f"enable_thinking={json.dumps(value)}",)
        config = make_config(tmp_path / "target", drafter, prompts, template_args=arguments)
        ids[value] = module._prompt(where, messages, tokenizer, loaded, config).tolist()
    assert ids[thinks] == stored.input_ids[: int(stored.loss_mask.argmax())].tolist() != ids[not thinks]


@pytest.mark.parametrize("kind", ["dense", "sliding"])
def test_blocks_are_embedded_as_the_target_embeds_also_where_it_scales(kind: str) -> None:
    model = tiny_target(kind)
    embed = model.get_input_embeddings()
    scales = not torch.equal(embed(torch.tensor([3])), embed.weight[3:4])
    assert scales == (kind == "sliding"), "Gemma multiplies by the root of the width"
    with torch.no_grad():
        assert torch.equal(module.target_parts(model).embedding, embed(torch.arange(len(embed.weight))))
    assert (module.target_parts(model).embedding.data_ptr() == embed.weight.data_ptr()) == (not scales)
