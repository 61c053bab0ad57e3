"""Make the demo's on-policy conversations: prompts from open sources, answers by the target itself.

python make_data.py prompts  --target TARGET --work WORK    collect and select the prompts
python make_data.py generate --target TARGET --work WORK    answer them greedily (resumable)
python make_data.py build    --target TARGET --work WORK    filter, group, split and write the JSONL files
python make_data.py check                                   verify the written files
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prompts import Prompt, collect, core, digest

HERE = Path(__file__).resolve().parent
SPLITS = ("train", "heldout")
MAX_PROMPT = 160
MAX_NEW = 128
SLOTS = 96
WINDOW = 512
CAPS = {"stdlib-write": 1900, "stdlib-explain": 1800, "stdlib-module": 1500}
THRESHOLD = 0.4
HELDOUT_SHARE = 0.10
REPEATS = 4


def encode(tokenizer: Any, messages: list[dict[str, str]], *, prompt: bool) -> list[int]:
    """Token ids of a rendered conversation; ``prompt`` adds the header of the assistant's turn."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def load_tokenizer(target: Path) -> Any:
    """The tokenizer saved by convert_target.py."""
    from transformers import AutoTokenizer

    if not (target / "tokenizer.json").is_file():
        raise SystemExit(f"error: {target} holds no target; fix: python convert_target.py {target}")
    return AutoTokenizer.from_pretrained(str(target))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file; a line cut short by a stop is skipped."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            yield row


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a JSONL file atomically."""
    scratch = path.with_suffix(".tmp")
    with scratch.open("w", encoding="utf-8", newline="\n") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    scratch.replace(path)


def make_prompts(target: Path, work: Path) -> None:
    """Select the prompts: short enough, at most CAPS per source, a stdlib function or class only once."""
    tokenizer = load_tokenizer(target)
    counts: collections.Counter[str] = collections.Counter()
    entities: set[str] = set()
    chosen: list[Prompt] = []
    for prompt in collect():
        single = prompt.entity.startswith(("function:", "class:"))
        full = counts[prompt.source] == CAPS.get(prompt.source)
        if full or (single and prompt.entity in entities):
            continue
        if len(encode(tokenizer, [{"role": "user", "content": prompt.text}], prompt=True)) > MAX_PROMPT:
            continue
        counts[prompt.source] += 1
        entities.add(prompt.entity)
        chosen.append(prompt)
    work.mkdir(parents=True, exist_ok=True)
    write_rows(work / "prompts.jsonl", ({"id": prompt.id, **asdict(prompt)} for prompt in chosen))
    print(f"{len(chosen)} prompts: {dict(sorted(counts.items()))}")


def read_answers(work: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """All answers generated so far, by the prompt's id and text."""
    return {(row["id"], row["text"]): row for path in sorted(work.glob("answers-*.jsonl")) for row in read_rows(path)}


def answer_shard(target: Path, work: Path, shard: int, threads: int, rows: list[dict[str, Any]]) -> None:
    """Answer the prompts in ``rows`` and append the answers to this shard's file."""
    import torch
    from decoder import Decoder

    torch.set_num_threads(threads)
    tokenizer = load_tokenizer(target)
    users = [[{"role": "user", "content": row["text"]}] for row in rows]
    pairs = [(row, encode(tokenizer, user, prompt=True)) for row, user in zip(rows, users, strict=True)]
    pairs = [
        pair
        for start in range(0, len(pairs), WINDOW)
        for pair in sorted(pairs[start : start + WINDOW], key=lambda item: len(item[1]))
    ]
    if not pairs:
        return
    decoder = Decoder(target, torch.bfloat16, SLOTS, MAX_PROMPT, MAX_NEW)
    path = work / f"answers-{shard}.jsonl"
    started, rows_made, tokens_made = time.monotonic(), 0, 0
    with path.open("a+b") as out:
        if out.tell():
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":
                out.write(b"\n")
        for index, ids in decoder.generate([ids for _, ids in pairs]):
            row = pairs[index][0]
            record = {
                "id": row["id"],
                "text": row["text"],
                "ids": ids,
                "finish_reason": "stop" if ids[-1] == decoder.end else "length",
            }
            out.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            out.flush()
            rows_made, tokens_made = rows_made + 1, tokens_made + len(ids)
            if rows_made % 100 == 0:
                speed = tokens_made / (time.monotonic() - started)
                print(f"shard {shard}: {rows_made}/{len(pairs)} rows, {speed:.0f} tokens/s", flush=True)


def generate(target: Path, work: Path, workers: int, threads: int) -> None:
    """Run the workers; stopping them loses nothing, a further call goes on."""
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", OMP_NUM_THREADS=str(threads))
    done = read_answers(work)
    rows = [row for row in read_rows(work / "prompts.jsonl") if (row["id"], row["text"]) not in done]
    context = multiprocessing.get_context("spawn")
    jobs = [
        context.Process(target=answer_shard, args=(target, work, shard, threads, rows[shard::workers]))
        for shard in range(workers)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    if any(job.exitcode for job in jobs):
        raise SystemExit("error: a worker failed; run the same command again to go on")
    print(f"{len(read_answers(work))} answers")


def words(text: str) -> list[str]:
    """The words and signs of a text, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def shingles(text: str, size: int) -> frozenset[tuple[str, ...]]:
    """The word n-grams of a text; a shorter text counts as one."""
    found = words(text)
    return frozenset(tuple(found[i : i + size]) for i in range(max(1, len(found) - size + 1)))


def similar_pairs(sets: list[frozenset[tuple[str, ...]]]) -> Iterator[tuple[int, int, float]]:
    """All (earlier, later, Jaccard index) of sets that share a shingle."""
    index: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
    for number, current in enumerate(sets):
        common: collections.Counter[int] = collections.Counter()
        for shingle in current:
            common.update(index[shingle])
            index[shingle].append(number)
        for other, count in common.items():
            yield other, number, count / (len(current) + len(sets[other]) - count)


def group_rows(rows: list[dict[str, Any]], entities: list[str]) -> list[list[int]]:
    """Join rows about one entity and near twins by prompt or answer (union-find)."""
    parent = list(range(len(rows)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    first: dict[str, int] = {}
    for number, entity in enumerate(entities):
        parent[root(number)] = root(first.setdefault(entity, number))
    for sets in contents(rows).values():
        for left, right, jaccard in similar_pairs(sets):
            if jaccard >= THRESHOLD:
                parent[root(right)] = root(left)
    groups: dict[int, list[int]] = collections.defaultdict(list)
    for number in range(len(rows)):
        groups[root(number)].append(number)
    return list(groups.values())


def contents(rows: list[dict[str, Any]]) -> dict[str, list[frozenset[tuple[str, ...]]]]:
    """The shingles of the prompts (without template words; pairs suit the short ones) and of the answers."""
    prompts = [core(row["messages"][0]["content"]) for row in rows]
    answers = [row["messages"][1]["content"] for row in rows]
    return {
        "prompt 4-gram": [shingles(text, 4) for text in prompts],
        "prompt 2-gram": [shingles(text, 2) for text in prompts],
        "answer 4-gram": [shingles(text, 4) for text in answers],
    }


def group_hash(prompts: Iterable[str]) -> int:
    """The hash of a group's content; the lowest HELDOUT_SHARE of all values is held out."""
    return digest("group:" + "\n".join(sorted(prompts)))


def split_of(value: int) -> str:
    """The side of the split for a group's hash."""
    return "heldout" if value < HELDOUT_SHARE * 2**64 else "train"


def problem(tokenizer: Any, prompt_ids: list[int], answer: dict[str, Any], row: dict[str, Any]) -> str:
    """Why an answer is dropped, or an empty string."""
    ids: list[int] = answer["ids"]
    body = ids[:-1] if answer["finish_reason"] == "stop" else ids
    if not row["messages"][1]["content"].strip():
        return "empty answer"
    if set(body) & set(tokenizer.all_special_ids):
        return "special token in the answer"
    rendered = encode(tokenizer, row["messages"], prompt=False)
    whole = prompt_ids + body
    if rendered[: len(whole)] != whole or len(rendered) != len(whole) + 2:  # the end token and a line feed
        return "tokens do not survive decoding and encoding"
    grams = collections.Counter(tuple(body[i : i + 8]) for i in range(len(body) - 7))
    return "repetition" if grams and max(grams.values()) >= REPEATS else ""


def build(target: Path, work: Path) -> int:
    """Filter the answers, group near twins, split by group and write both files; then check them."""
    tokenizer = load_tokenizer(target)
    answers = read_answers(work)
    rows: list[dict[str, Any]] = []
    entities: list[str] = []
    sizes: list[tuple[int, int]] = []
    drops: collections.Counter[str] = collections.Counter()
    for prompt in read_rows(work / "prompts.jsonl"):
        answer = answers.get((prompt["id"], prompt["text"]))
        if answer is None:
            drops["no answer yet"] += 1
            continue
        user = {"role": "user", "content": prompt["text"]}
        ids = answer["ids"][:-1] if answer["finish_reason"] == "stop" else answer["ids"]
        reply = {"role": "assistant", "content": tokenizer.decode(ids, clean_up_tokenization_spaces=False)}
        row = {
            "id": prompt["id"],
            "source": prompt["source"],
            "group": "",
            "messages": [user, reply],
            "finish_reason": answer["finish_reason"],
        }
        prompt_ids = encode(tokenizer, [user], prompt=True)
        reason = problem(tokenizer, prompt_ids, answer, row)
        if reason:
            drops[reason] += 1
            continue
        rows.append(row)
        entities.append(prompt["entity"])
        sizes.append((len(prompt_ids), len(answer["ids"])))
    groups = group_rows(rows, entities)
    split: dict[str, str] = {}
    for members in groups:
        value = group_hash(rows[number]["messages"][0]["content"] for number in members)
        for number in members:
            rows[number]["group"] = f"{value:016x}"
            split[rows[number]["id"]] = split_of(value)
    for name in SPLITS:
        chosen = [n for n, row in enumerate(rows) if split[row["id"]] == name]
        write_rows(
            HERE / f"{name}.jsonl", (rows[n] for n in sorted(chosen, key=lambda n: digest("row:" + rows[n]["id"])))
        )
        prompt_tokens, answer_tokens = (sum(sizes[n][side] for n in chosen) for side in (0, 1))
        print(f"{name}: prompt tokens {prompt_tokens}, answer tokens {answer_tokens}")
    largest = sorted(map(len, groups), reverse=True)[:5]
    print(f"dropped: {dict(drops)}; {len(groups)} groups, the largest of {largest} rows")
    return check()


def check() -> int:
    """Verify the written files; return the number of violations."""
    sides = {name: list(read_rows(HERE / f"{name}.jsonl")) for name in SPLITS}
    rows = [row for name in SPLITS for row in sides[name]]
    border = len(sides["train"])
    problems: list[str] = []
    if len({row["id"] for row in rows}) != len(rows):
        problems.append("ids are not unique")
    if len({row["messages"][0]["content"] for row in rows}) != len(rows):
        problems.append("prompts are not unique")
    members: dict[str, list[str]] = collections.defaultdict(list)
    for number, row in enumerate(rows):
        members[row["group"]].append(row["messages"][0]["content"])
        roles = [message["role"] for message in row["messages"]]
        if roles != ["user", "assistant"] or row["finish_reason"] not in ("stop", "length"):
            problems.append(f"{row['id']}: malformed")
        if split_of(int(row["group"], 16)) != SPLITS[number >= border]:
            problems.append(f"{row['id']}: on the wrong side")
    problems += [
        f"group {name}: its hash does not match its prompts"
        for name, prompts in members.items()
        if f"{group_hash(prompts):016x}" != name
    ]
    if {row["group"] for row in sides["train"]} & {row["group"] for row in sides["heldout"]}:
        problems.append("a group is on both sides")
    for kind, sets in contents(rows).items():
        worst = max((j for left, right, j in similar_pairs(sets) if left < border <= right), default=0.0)
        print(f"largest {kind} Jaccard index between the splits: {worst:.3f}")
        if worst >= THRESHOLD:
            problems.append(f"near twins by {kind} on both sides")
    for name in SPLITS:
        counts = collections.Counter(row["source"] for row in sides[name])
        cut = sum(row["finish_reason"] == "length" for row in sides[name])
        print(f"{name}: {len(sides[name])} rows ({cut} cut at the limit) {dict(sorted(counts.items()))}")
    for line in problems[:20]:
        print("problem: " + line, file=sys.stderr)
    print("FAILED" if problems else "ok")
    return len(problems)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the demo's on-policy conversations.")
    parser.add_argument("step", choices=("prompts", "generate", "build", "check"))
    parser.add_argument("--target", type=Path, help="folder written by convert_target.py")
    parser.add_argument("--work", type=Path, help="folder for intermediate files")
    parser.add_argument("--workers", type=int, default=2, help="processes of the generate step (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process (default 1)")
    args = parser.parse_args(argv)
    if args.step == "check":
        return int(check() > 0)
    if args.target is None or args.work is None:
        parser.error(f"{args.step} needs --target and --work")
    if args.step == "prompts":
        make_prompts(args.target, args.work)
    elif args.step == "generate":
        generate(args.target, args.work, args.workers, args.threads)
    else:
        return int(build(args.target, args.work) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
