"""Speculative decoding with the real target: how much is gained, and proof that the answers are the target's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from cache_tools.errors import CheckpointError, ConfigError, DataError, TargetError
from cache_tools.order import mix64
from cache_tools.progress import Progress
from cache_tools.template_args import parse_template_args
from train.acceptance import acceptance_lines, acceptance_report, answer_rows, shown_length
from train.config import EvalConfig
from train.decoding import Decoded, SpeculativeDecoder, decode_plain
from train.devices import pick_device
from train.drafter import DFlashDrafter
from train.loading import load_any_drafter
from train.sampling import Chooser, Greedy, Sampling
from train.target_parts import TargetParts

_DRAW_KEY = 0x64726177  # separates the draws from every other use of the same seed


def evaluate(config: EvalConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Decodes every prompt with the drafter and, unless `config.plain` is off, without it.

    Returns a report for JSON: over all prompts, and the same for every file in `files`, there with `answers`, the rows
    of `answer_rows` in the order of the prompts. Beside what `acceptance_report` gives, speeds are tokens per second
    after the prompt's pass. `identical` counts requests whose answer is the same token for token with and without
    drafter; drawn answers are not compared. A number that needs more than an answer's first token, which the prompt's
    pass makes, is None when no answer had more.

    Raises ConfigError, TargetError, DataError or CheckpointError for what cannot be loaded or does not fit.
    """
    assert config.target is not None
    device = pick_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    files = [(path, list(_rows(path, config.max_prompts))) for path in config.prompts]
    target, tokenizer = _load_target(config.target, device, dtype)
    drafter = load_any_drafter(config.drafter, config.checkpoint).to(device, dtype).eval()
    _check_fit(drafter, target, config)
    prompts = [
        [_prompt(where, said, tokenizer, target, config).to(device) for where, said in rows] for _, rows in files
    ]
    decoder = SpeculativeDecoder(target, drafter, target_parts(target))
    options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "stop_ids": _stop_ids(target)}

    speculative: list[list[Decoded]] = []
    plain: list[list[Decoded]] = []
    for prompts_of_file in prompts:
        speculative.append([])
        plain.append([])
        for prompt in prompts_of_file:
            number = sum(map(len, speculative))
            speculative[-1].append(decoder.decode(prompt, chooser=_chooser(config, number, device), **options))
            if config.plain:
                plain[-1].append(decode_plain(target, prompt, chooser=_chooser(config, number, device), **options))
            if progress is not None:
                progress.update(len(speculative[-1][-1].tokens))
                progress.set_note(f"{number + 1} prompts")
    size = drafter.config.block_size
    report = _report(config, size, [*chain(*speculative)], [*chain(*plain)])
    parts = zip(config.prompts, speculative, plain, strict=True)
    report["files"] = [
        {"prompts": str(path), **_report(config, size, drafted, own), "answers": answer_rows(drafted)}
        for path, drafted, own in parts
    ]
    return report


def describe(report: Mapping[str, Any]) -> str:
    """The report as lines for a person."""
    drawn = f", temperature {report['temperature']:g}" if report["temperature"] else ""
    lines = [
        f"prompts            {report['num_prompts']} ({report['num_tokens']:,} tokens, {report['dtype']}{drawn})",
        *acceptance_lines(report),
        f"speed              {_speeds(report)}",
    ]
    if report["identical"] is not None:
        lines.append(f"greedy output      {report['identical']} of {report['num_prompts']} identical to plain decoding")
    files = report.get("files", [])
    for part in files if len(files) > 1 else []:
        lines.append(
            f"{part['prompts']}: {part['num_prompts']} prompts, acceptance length "
            f"{shown_length(part['acceptance_length'])} (mean), {shown_length(part['acceptance_length_pooled'])} "
            f"(pooled), {_speeds(part)}"
        )
    return "\n".join(lines)


def _speeds(report: Mapping[str, Any]) -> str:
    speed = "-" if report["tokens_per_second"] is None else f"{report['tokens_per_second']:.1f} tok/s"
    if report["speedup"] is None:
        return speed
    return f"{report['plain_tokens_per_second']:.1f} -> {speed} ({report['speedup']:.2f}x)"


def _chooser(config: EvalConfig, number: int, device: torch.device) -> Chooser:
    """How the tokens of one prompt are chosen; its draws do not depend on other prompts."""
    if not config.temperature:
        return Greedy()
    seed = mix64(config.seed, _DRAW_KEY, number) >> 1  # torch takes 63 bits
    return Sampling(config.temperature, seed=seed, device=device)


def target_parts(target: Any) -> TargetParts:
    """Embedding and output head of a loaded target, by module. Its final norm is not needed to draft.

    The embedding is what its module returns, as in a store: some targets scale its weight on the way.
    """
    embed = target.get_input_embeddings()
    embedding: Tensor = embed.weight.detach()
    tokens = torch.arange(embedding.shape[0], device=embedding.device)
    with torch.no_grad():
        if not torch.equal(embed(tokens[:8]), embedding[:8]):
            embedding = embed(tokens)
    head = target.get_output_embeddings().weight.detach()
    unused = torch.ones(embedding.shape[1], device=embedding.device)
    return TargetParts(embedding=embedding, lm_head=head, norm_weight=unused, norm_eps=0.0, norm_adds_one=False)


def _report(config: EvalConfig, block_size: int, speculative: list[Decoded], plain: list[Decoded]) -> dict[str, Any]:
    speed = _speed(speculative)
    plain_speed = _speed(plain) if plain else None
    compared = plain if not config.temperature else []
    return {
        "num_prompts": len(speculative),
        "num_tokens": sum(len(decoded.tokens) for decoded in speculative),
        "dtype": config.dtype,
        "temperature": config.temperature,
        "block_size": block_size,
        **acceptance_report(speculative, block_size),
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain_speed,
        "speedup": speed / plain_speed if speed and plain_speed else None,
        "identical": sum(a.tokens == b.tokens for a, b in zip(speculative, plain, strict=True)) if compared else None,
    }


def _speed(decoded: list[Decoded]) -> float | None:
    """None when every answer was one token long: the prompt's pass made it, and nothing was decoded."""
    seconds = sum(one.decode_seconds for one in decoded)
    tokens = sum(one.decode_tokens for one in decoded)
    return tokens / seconds if tokens and seconds > 0 else None


def _load_target(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").exists():
        raise TargetError("no target model here", where=folder, expected="a folder with config.json and weights")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise TargetError("the target cannot be loaded", where=folder, got=error) from error
    model: Any = target
    return model.to(device).eval(), tokenizer


def _check_fit(drafter: DFlashDrafter, target: Any, config: EvalConfig) -> None:
    text = target.config.get_text_config()
    pairs = {
        "hidden_size": (drafter.config.hidden_size, text.hidden_size),
        "vocab_size": (drafter.config.vocab_size, text.vocab_size),
        "num_target_layers": (drafter.config.num_target_layers, text.num_hidden_layers),
    }
    differing = [f"{name} {mine} against {theirs}" for name, (mine, theirs) in pairs.items() if mine != theirs]
    if differing:
        raise CheckpointError(
            "the drafter was made for another target",
            where=config.drafter,
            got="; ".join(differing),
            expected=f"a drafter of {config.target}",
        )


def _stop_ids(target: Any) -> set[int]:
    ids = target.generation_config.eos_token_id
    if ids is None:
        ids = target.config.get_text_config().eos_token_id
    return set(ids) if isinstance(ids, list) else set() if ids is None else {ids}


def _prompt(where: str, messages: list[dict[str, Any]], tokenizer: Any, target: Any, config: EvalConfig) -> Tensor:
    """Token ids [n] of a prompt."""
    try:
        variables = parse_template_args(config.template_args)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables)
    except Exception as error:  # templates raise whatever they like
        raise DataError("the chat template refuses a prompt", where=where, got=error) from error
    longest = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and len(ids) + config.max_new_tokens > longest:
        raise DataError(
            "a prompt and its answer are longer than the target's positions",
            where=where,
            got=f"{len(ids)} tokens and --max-new-tokens {config.max_new_tokens}",
            expected=f"at most {longest} together",
            fix="shorten or remove the prompt, or lower --max-new-tokens",
        )
    return torch.tensor(ids, dtype=torch.int64)


def _rows(path: Path, limit: int | None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(file and line, messages up to the last user turn) of a JSONL file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the prompts cannot be read", where=path, got=error) from error
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise DataError("no prompts in this file", where=path, expected="one JSON object with `messages` per line")
    for number, line in rows[:limit]:
        yield f"{path}:{number}", _messages(line, f"{path}:{number}")


def _messages(line: str, where: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(line)["messages"]
        last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
        if not messages[last_user]["content"]:
            raise ValueError("the last user message is empty")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "this row is not a prompt",
            where=where,
            got=line[:80],
            expected='{"messages": [{"role": "user", "content": ...}, ...]}',
        ) from error
    found: list[dict[str, Any]] = messages[: last_user + 1]
    return found
