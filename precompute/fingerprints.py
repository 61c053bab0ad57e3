"""What identifies a target, its tokenizer, its template and a data file: SHA-256 over content, never names or dates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cache_tools.errors import TargetError
from cache_tools.progress import Progress

_READ_BYTES = 8 * 2**20
_NOISE_KEYS = {"transformers_version", "_name_or_path", "name_or_path"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_COPIED_FILES = (*_TOKENIZER_FILES, "config.json", "generation_config.json", "chat_template.jinja")


def file_sha256(path: Path, progress: Progress | None = None) -> str:
    """Hash of a file's content, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            if progress is not None:
                progress.update(len(block))
    return digest.hexdigest()


def files_sha256(paths: Sequence[Path], *, num_threads: int, progress: Progress | None = None) -> list[str]:
    """`file_sha256` of many files at once; hashing releases the interpreter lock."""
    with ThreadPoolExecutor(max(num_threads, 1)) as pool:
        return list(pool.map(lambda path: file_sha256(path, progress), paths))


def json_sha256(value: Any) -> str:
    """Hash of a JSON value, independent of key order, spaces and keys that only say who wrote the file."""
    text = json.dumps(_without_noise(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def config_sha256(target: Path) -> str:
    """Hash of the target's config.json. Raises TargetError if there is none."""
    return json_sha256(_read_json(target / "config.json"))


def tokenizer_sha256(target: Path) -> str:
    """Hash of all tokenizer files, without the chat template. Raises TargetError if there are none."""
    parts: dict[str, str] = {}
    for name in _TOKENIZER_FILES:
        path = target / name
        if not path.is_file():
            continue
        if name == "tokenizer_config.json":
            config = _read_json(path)
            parts[name] = json_sha256({key: value for key, value in config.items() if key != "chat_template"})
        else:
            parts[name] = file_sha256(path)
    if not parts:
        raise TargetError(
            "the target's folder has no tokenizer", where=target, expected=f"one of {', '.join(_TOKENIZER_FILES)}"
        )
    return json_sha256(parts)


def template_sha256(template: str | None) -> str:
    """Hash of the chat template's text; of nothing, if the target has none."""
    return hashlib.sha256((template or "").encode()).hexdigest()


def weight_files(target: Path) -> list[Path]:
    """The target's weight files, sorted; safetensors win over pickles. Raises TargetError if there are none."""
    for pattern in _WEIGHT_PATTERNS:
        files = sorted(target.glob(pattern))
        if files:
            return files
    raise TargetError(
        "the target's folder has no weights",
        where=target,
        expected=f"files named {' or '.join(_WEIGHT_PATTERNS)}",
        fix="`plan` works without weights, `run` needs them",
    )


def weights_sha256(target: Path, *, num_threads: int, progress: Progress | None = None) -> str:
    """Hash over the content of all weight files. Raises TargetError if there are none, or one cannot be read."""
    files = weight_files(target)
    try:
        hashes = files_sha256(files, num_threads=num_threads, progress=progress)
    except OSError as error:
        raise TargetError("a weight file cannot be read", where=error.filename, got=error) from error
    return json_sha256({file.name: digest for file, digest in zip(files, hashes, strict=True)})


def target_files(target: Path) -> dict[str, bytes]:
    """Config, tokenizer and template files that travel with a store, by name."""
    return {name: (target / name).read_bytes() for name in sorted(_COPIED_FILES) if (target / name).is_file()}


def _without_noise(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_noise(item) for key, item in value.items() if key not in _NOISE_KEYS}
    if isinstance(value, list):
        return [_without_noise(item) for item in value]
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TargetError(
            "a file of the target is missing", where=path, fix="--target must name the model's folder"
        ) from error
    except (ValueError, OSError) as error:
        raise TargetError("a file of the target cannot be read", where=path, got=error) from error
    if not isinstance(value, dict):
        raise TargetError("a file of the target cannot be read", where=path, got=type(value).__name__)
    return value
