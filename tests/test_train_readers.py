"""Exported drafters in the speculators library 0.9.0, from the package index, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train_export import FULL, SLIDING, tiny_config, tiny_drafter
from test_train_formats import call, llama
from torch import Tensor
from torch.nn.functional import embedding

from train.anchors import block_tokens
from train.attention import BlockLayout
from train.drafter import DFlashDrafter
from train.drafter_config import DrafterConfig
from train.export import export_drafter
from train.target_folder import TargetFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Without their dependencies: torchvision and torchaudio, never used here, would bring a torch of their own.
ALONE = ("speculators==0.9.0", "hs-connectors==0.9.0")
TOGETHER = ("transformers==5.19.0", "datasets==5.1.0", "openai==3.57.0", "loguru==0.7.3", "pydantic-settings==2.16.3")


@pytest.fixture(scope="session")
def speculators(pytestconfig: pytest.Config) -> Path:
    """Python of an environment with the library; torch and what else it shares with this one is taken from here."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("speculators-0.9.0") / "venv"
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (folder / packages / "parent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for arguments in (["--no-deps", *ALONE], list(TOGETHER)):
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"speculators 0.9.0 cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    ready.touch()
    return python


def read(python: Path, *arguments: object) -> None:
    script = Path(__file__).with_name("speculators_reader.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [str(python), str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "t"
    llama().bfloat16().save_pretrained(path)
    return path


def pack(config: DrafterConfig, lengths: list[int], anchors: list[int]) -> dict[str, Tensor]:
    """Random features and tokens of documents of these lengths, one after the other."""
    generator = torch.Generator().manual_seed(sum(lengths))
    num_rows = sum(lengths)
    return {
        "features": torch.randn(num_rows, len(config.target_layer_ids) * config.hidden_size, generator=generator),
        "input_ids": torch.randint(0, config.vocab_size, (num_rows,), generator=generator),
        "anchors": torch.tensor(anchors),
        "documents": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        "positions": torch.cat([torch.arange(length) for length in lengths]),
    }


def our_logits(drafter: DFlashDrafter, given: dict[str, Tensor], target: Path) -> Tensor:
    """[A*B, V] of the trainer's drafter, with embedding and head from the target's folder."""
    config = drafter.config
    embed, head = TargetFolder.open(target).embedding_and_head((config.vocab_size, config.hidden_size))
    lengths = given["documents"].bincount()
    layout = BlockLayout(given["anchors"], torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(), config.block_size)
    tokens = block_tokens(given["anchors"], given["input_ids"], config.block_size, config.mask_token_id)
    with torch.no_grad():
        hidden: Tensor = drafter(embedding(tokens, embed.float()), drafter.context(given["features"]), layout)
    return hidden.flatten(0, 1) @ head.float().T


@pytest.mark.parametrize(
    ("layer_types", "window"),
    [((FULL, FULL), None), ((SLIDING, SLIDING), 40), ((SLIDING, SLIDING, FULL), 40)],
    ids=["full", "sliding", "mixed"],
)
def test_the_library_computes_the_same_logits(
    tmp_path: Path, speculators: Path, target: Path, layer_types: tuple[str, ...], window: int | None
) -> None:
    """Two documents in one pack, anchors at their ends and in the middle, sliding layers causal in the block.

    The documents fit into the window: the library cuts it per block, not per slot, and one row later than the engines.
    """
    drafter = DFlashDrafter(tiny_config(*layer_types, sliding_window=window))
    drafter.load_state_dict(tiny_drafter(*layer_types).state_dict())
    export_drafter(drafter, tmp_path / "s", format="speculators", target=TargetFolder.open(target))
    given = pack(drafter.config, [30, 34], [1, 7, 24, 29, 31, 50])
    save_file(given, tmp_path / "in.safetensors")
    read(speculators, "logits", tmp_path / "s", tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    theirs = load_file(tmp_path / "out.safetensors")["logits"]
    ours = our_logits(drafter, given, target)
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_librarys_own_conversion_says_the_same_and_is_imported(
    tmp_path: Path, speculators: Path, target: Path
) -> None:
    drafter = tiny_drafter(SLIDING, FULL)
    export_drafter(drafter, tmp_path / "z")
    export_drafter(drafter, tmp_path / "s", format="speculators", target=TargetFolder.open(target))
    read(speculators, "convert", tmp_path / "z", target, tmp_path / "theirs")
    theirs, ours = (flat(json.loads((tmp_path / n / "config.json").read_text())) for n in ("theirs", "s"))
    layers = "transformer_layer_config."
    assert ours.keys() - theirs.keys() == {"num_target_layers", layers + "rope_theta"}
    defaults = {layers + name for name in ("bos_token_id", "initializer_range", "use_cache")}
    assert theirs.keys() - ours.keys() == defaults | {"auto_map.", "transformers_version"}
    assert {key: ours[key] for key in ours.keys() & theirs.keys()} == {
        key: theirs[key] for key in ours.keys() & theirs.keys()
    }
    call("import", "--from", tmp_path / "theirs", "--out", tmp_path / "back", "--target", target)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "z" / name).read_bytes()


def flat(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found
