"""The demo's data: complete rows, and no near twins across the split."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "smollm2"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def test_every_row_is_a_prompt_with_its_answer() -> None:
    for row in (*rows("train.jsonl"), *rows("heldout.jsonl")):
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message["content"].strip() for message in row["messages"])
        assert row["finish_reason"] in ("stop", "length")


def test_groups_of_near_twins_stay_on_one_side() -> None:
    train, heldout = rows("train.jsonl"), rows("heldout.jsonl")
    assert not {row["group"] for row in train} & {row["group"] for row in heldout}
    ids = [row["id"] for row in (*train, *heldout)]
    assert len(ids) == len(set(ids)) >= 3000


def test_no_prompt_or_answer_has_a_near_twin_on_the_other_side() -> None:
    command = [sys.executable, str(FOLDER / "make_data.py"), "check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_of_the_data_states_the_true_counts() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = re.search(r"\| conversations \| ([\d,]+) \| ([\d,]+) \|", text)
    assert found is not None
    counts = [int(found[i].replace(",", "")) for i in (1, 2)]
    assert counts == [len(rows("train.jsonl")), len(rows("heldout.jsonl"))]
