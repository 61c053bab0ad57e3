"""Tiny targets, tokenizers, templates and data for the tests of precompute; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3_5TextConfig, Qwen3Config

from precompute.config import PrecomputeConfig

SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|endoftext|>"]
VOCAB_SIZE = 512
# Shards of 64 tokens and more, so that the few samples of a test fill several.
SMALL_SHARD_BYTES = 64 * 32 * 2
# Words, digits, symbols and runs of line ends, in the manner of current tokenizers.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
Kind = Literal["llama", "qwen3", "hybrid"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Tags around the content only: the end token behind them belongs to the answer all the same.
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED_WITH_TAIL = TAGGED.replace("{% endgeneration %}<|im_end|>\n", "<|im_end|>\n{% endgeneration %}")
# Thinking of earlier turns is removed, the last turn always shows a thinking block.
STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The number of messages stands in front, so no conversation begins like a longer one.
COUNTS_MESSAGES = (
    "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}"
)
NO_SPECIALS = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
ENDS_TWICE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)


def make_tokenizer(template: str | None = CHATML) -> Any:
    """A byte-level BPE tokenizer that merges line ends and a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["hello there good day to you\n\n\n", "how are you\n\n", " Hello day", "1 2 3"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast_class: Any = PreTrainedTokenizerFast
    fast = fast_class(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<s>", "</s>"],
    )
    fast.chat_template = template
    return fast


def make_config(kind: Kind, **changes: Any) -> Any:
    """A text model of 4 layers; the hybrid has three linear-attention layers and one with full attention."""
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": kind == "llama",
    }
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    if kind == "llama":
        return LlamaConfig(**{**common, **changes})
    if kind == "qwen3":
        return Qwen3Config(**{**common, **changes})
    return Qwen3_5TextConfig(**{**common, **linear, **changes})


def make_target(
    folder: Path,
    kind: Kind = "llama",
    *,
    template: str | None = CHATML,
    dtype: torch.dtype = torch.bfloat16,
    weights: bool = True,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Saves a target with random weights (all of them, norms included) and a tokenizer."""
    config = make_config(kind, **changes)
    config.dtype = dtype
    if weights:
        torch.manual_seed(seed)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.to(dtype).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    """A row whose messages alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages, **more}


def chats(count: int) -> list[dict[str, Any]]:
    """Different conversations of different lengths."""
    return [chat(f"hello {i}", "good day to you " * (1 + i * 7 % 11) + str(i), id=f"row-{i}") for i in range(count)]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """One JSON value per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_precompute_config(target: Path, data: Path, store: Path | None = None, **changes: Any) -> PrecomputeConfig:
    """Small settings for a tiny target on the CPU."""
    settings: dict[str, Any] = {
        "layer_ids": (0, 2),
        "chunk_rows": 8,
        "shard_mb": 1,
        "batch_tokens": 256,
        "max_length": 256,
        "device": "cpu",
        "threads": 1,
        **changes,
    }
    return PrecomputeConfig(target=target, data=(data,), store=store, **settings)


def directory_bytes(root: Path) -> dict[str, bytes]:
    """Every file below `root` by relative path."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
