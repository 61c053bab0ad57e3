"""Speculative decoding against the real target: how much is gained, and proof that the answers are the target's own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from cache_tools.errors import CheckpointError, ConfigError, DataError, TargetError
from cache_tools.progress import Progress
from cache_tools.template_args import parse_template_args
from train.config import EvalConfig
from train.decoding import Decoded, SpeculativeDecoder, decode_greedily
from train.devices import pick_device
from train.drafter import DFlashDrafter
from train.loading import load_any_drafter
from train.target_parts import TargetParts


def evaluate(config: EvalConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Decodes every prompt with the drafter and, unless `config.plain` is off, without it.

    Returns a report for JSON. Acceptance lengths are tokens per verification step, the bonus token included, once as
    the mean over requests of each request's mean and once pooled over all steps; `by_position` has, for slot k = 1..,
    the share of proposals accepted (`accepted`) and the share among those whose earlier slots were all accepted
    (`conditional`). Speeds are tokens per second after the prompt's pass. `identical` counts requests whose answer is
    the same token for token with and without drafter. A number that needs more than an answer's first token, which
    the prompt's pass makes, is None when no answer had more.

    Raises ConfigError, TargetError, DataError or CheckpointError for what cannot be loaded or does not fit.
    """
    device = pick_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    rows = [row for path in config.prompts for row in _rows(path, config.max_prompts)]
    target, tokenizer = _load_target(config.target, device, dtype)
    drafter = load_any_drafter(config.drafter).to(device, dtype).eval()
    _check_fit(drafter, target, config)
    decoder = SpeculativeDecoder(target, drafter, target_parts(target))
    stop_ids = _stop_ids(target)

    speculative: list[Decoded] = []
    plain: list[Decoded] = []
    prompts = [_prompt(where, messages, tokenizer, target, config) for where, messages in rows]
    for prompt in prompts:
        options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "stop_ids": stop_ids}
        speculative.append(decoder.decode(prompt.to(device), **options))
        if config.plain:
            plain.append(decode_greedily(target, prompt.to(device), **options))
        if progress is not None:
            progress.update(len(speculative[-1].tokens))
            progress.set_note(f"{len(speculative)} prompts")
    return _report(config, drafter.config.block_size, speculative, plain)


def describe(report: dict[str, Any]) -> str:
    """The report as lines for a person."""
    lines = [
        f"prompts            {report['num_prompts']} ({report['num_tokens']:,} tokens, {report['dtype']})",
        f"acceptance length  {_shown(report['acceptance_length'])} (mean over requests), "
        f"{_shown(report['acceptance_length_pooled'])} (pooled), bonus token included",
        "accepted at slot   " + _by_slot(report, "accepted"),
        "if all before were " + _by_slot(report, "conditional"),
    ]
    speed = "-" if report["tokens_per_second"] is None else f"{report['tokens_per_second']:.1f} tok/s"
    if report["speedup"] is not None:
        speed = f"{report['plain_tokens_per_second']:.1f} -> {speed} ({report['speedup']:.2f}x)"
    lines.append(f"speed              {speed}")
    if report["identical"] is not None:
        lines.append(f"greedy output      {report['identical']} of {report['num_prompts']} identical to plain decoding")
    return "\n".join(lines)


def target_parts(target: Any) -> TargetParts:
    """Embedding and output head of a loaded target, by module. Its final norm is not needed to draft."""
    embedding = target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()
    unused = torch.ones(embedding.shape[1], device=embedding.device)
    return TargetParts(embedding=embedding, lm_head=head, norm_weight=unused, norm_eps=0.0, norm_adds_one=False)


def _shown(length: float | None) -> str:
    return "-" if length is None else f"{length:.3f}"


def _by_slot(report: dict[str, Any], name: str) -> str:
    """Up to the first slot that was never reached."""
    shares = itertools.takewhile(lambda share: share is not None, (slot[name] for slot in report["by_position"]))
    return "  ".join(f"{k}: {share:.0%}" for k, share in enumerate(shares, start=1)) or "-"


def _report(config: EvalConfig, block_size: int, speculative: list[Decoded], plain: list[Decoded]) -> dict[str, Any]:
    steps = [length for decoded in speculative for length in decoded.acceptance_lengths]
    means = [sum(d.acceptance_lengths) / len(d.acceptance_lengths) for d in speculative if d.acceptance_lengths]
    speed = _speed(speculative)
    plain_speed = _speed(plain) if plain else None
    proposed, reached, accepted = (
        [sum(getattr(decoded, name)[slot] for decoded in speculative) for slot in range(block_size - 1)]
        for name in ("proposed_at", "reached_at", "accepted_at")
    )
    return {
        "num_prompts": len(speculative),
        "num_tokens": sum(len(decoded.tokens) for decoded in speculative),
        "dtype": config.dtype,
        "block_size": block_size,
        "acceptance_length": _mean(means),
        "acceptance_length_pooled": _mean(steps),
        "by_position": [
            {"accepted": a / p if p else None, "conditional": a / r if r else None}
            for p, r, a in zip(proposed, reached, accepted, strict=True)
        ],
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain_speed,
        "speedup": speed / plain_speed if speed and plain_speed else None,
        "identical": sum(a.tokens == b.tokens for a, b in zip(speculative, plain, strict=True)) if plain else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


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
