"""The embedded model's training text: what CPython documents, and the questions it answers."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from models.pydoc_chat import CLEARER_ANSWERS, QUESTIONS

SKIPPED_DIRS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "idlelib",
    "turtledemo", "pydoc_data", "encodings", "ensurepip", "msilib", "__pycache__", "distutils",
    "_pyrepl", "macholib",
}  # fmt: skip
# Written in C, so their docstrings are in no Python source; importing these has no side effects.
C_MODULES = [
    "array", "bisect", "binascii", "builtins", "cmath", "collections", "datetime", "errno",
    "functools", "gc", "hashlib", "heapq", "itertools", "json", "marshal", "math", "operator",
    "os", "select", "signal", "socket", "struct", "sys", "time", "unicodedata", "weakref", "zlib",
]  # fmt: skip
# Asked about most, so seen most often in training.
POPULAR = {
    "argparse", "asyncio", "base64", "bisect", "builtins", "collections", "contextlib", "copy",
    "csv", "dataclasses", "datetime", "enum", "functools", "glob", "hashlib", "heapq", "inspect",
    "io", "itertools", "json", "logging", "math", "operator", "os", "os.path", "pathlib", "pickle",
    "pprint", "queue", "random", "re", "shutil", "socket", "sqlite3", "statistics", "string",
    "struct", "subprocess", "sys", "tempfile", "textwrap", "threading", "time", "timeit",
    "traceback", "typing", "unittest", "urllib.parse", "urllib.request", "uuid", "zipfile",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One documented name: ``kind`` is module, class, function or topic."""

    kind: str
    name: str
    module: str
    text: str
    signature: str = ""


def _public_module(path: Path, root: Path) -> str | None:
    """Returns the dotted name users import, or None for a source to leave out."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    if SKIPPED_DIRS.intersection(parts) or any("-" in part for part in parts):
        return None
    if parts[-1] == "__init__":
        parts.pop()
    if parts and parts[0] in {"asyncio", "unittest"}:
        parts = parts[:1]  # These packages re-export what their submodules define.
    name = ".".join(parts)
    return {"posixpath": "os.path", "ntpath": None, "nturl2path": None}.get(name, name)


def _walk(tree: ast.AST, prefix: str, module: str) -> Iterator[Entry]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{node.name}"
            is_class = isinstance(node, ast.ClassDef)
            signature = "" if isinstance(node, ast.ClassDef) else _signature(name, node)
            if text := ast.get_docstring(node):
                yield Entry("class" if is_class else "function", name, module, text, signature)
            if is_class:
                yield from _walk(node, name, module)
        elif isinstance(node, ast.If | ast.Try):
            yield from _walk(node, prefix, module)


def _signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
    return f"{name}({arguments})"


def collect_source_entries() -> Iterator[Entry]:
    """Yields the docstrings of the standard library's Python sources, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        module = _public_module(path, root)
        if not module:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # A few sources are deliberately broken examples.
        if text := ast.get_docstring(tree):
            yield Entry("module", module, module, text)
        yield from _walk(tree, module, module)


def collect_c_entries() -> Iterator[Entry]:
    """Yields the docstrings of names implemented in C, which have no Python source to read."""
    for module_name in C_MODULES:
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        if module_name != "builtins" and module.__doc__:
            yield Entry("module", module_name, module_name, inspect.cleandoc(module.__doc__))
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or not (inspect.isbuiltin(value) or inspect.isclass(value)):
                continue
            kind = "class" if inspect.isclass(value) else "function"
            if text := inspect.getdoc(value):
                yield Entry(kind, prefix + name, module_name, text)
            members = sorted(vars(value).items()) if kind == "class" else []
            for member, method in members:
                text = getattr(method, "__doc__", None)
                if text and not member.startswith("_") and inspect.ismethoddescriptor(method):
                    full_name = f"{prefix}{name}.{member}"
                    yield Entry("function", full_name, module_name, inspect.cleandoc(text))


def collect_topics() -> Iterator[Entry]:
    """Yields the language-reference topics that ``help('topics')`` shows."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for text in (topics[key] for key in sorted(topics)):
        title, _, body = text.strip().partition("\n")
        yield Entry("topic", title.replace('"', "").strip(), "", body.strip("*=-\n "))


def collect() -> list[Entry]:
    """Returns every entry once, first occurrence of a text or name kept."""
    seen: set[str] = set()
    entries: list[Entry] = []
    for entry in itertools.chain(collect_source_entries(), collect_c_entries(), collect_topics()):
        if entry.text not in seen and entry.name not in seen:
            # The functions of ``random`` are methods of one hidden instance.
            name = entry.name.replace("random.Random.", "random.")
            signature = entry.signature.replace("random.Random.", "random.")
            entries.append(replace(entry, name=name, signature=signature))
            seen.update((entry.text, entry.name))
    return entries


def _prose(block: str, kind: str) -> str | None:
    indented = block.startswith("   ") or ">>>" in block or "::=" in block
    underlined = re.search(r"^[=\-*~]{3,}$", block, re.M) is not None
    text = re.sub(r"\s*\([Ss]ee (also )?section [^)]*\)", "", re.sub(r"\s+", " ", block).strip())
    example_follows = text.endswith(":") and len(text) < 60
    heading = kind == "topic" and len(text.split()) < 6
    versions = re.match(r"(New|Changed) in version", text) is not None
    return None if indented or underlined or example_follows or heading or versions else text


def _answer(entry: Entry) -> str | None:
    """Returns a short answer made of the first prose paragraphs of an entry."""
    if entry.name in CLEARER_ANSWERS:
        return CLEARER_ANSWERS[entry.name]
    paragraphs = [
        p for block in re.split(r"\n\s*\n", entry.text) if (p := _prose(block, entry.kind))
    ]
    prose = [p for p in paragraphs if not re.match(r"[\w.]+\(.*\) -+> ", p)]
    paragraphs = prose or paragraphs  # A bare C signature only where there is nothing else.
    while len(paragraphs) > 1 and paragraphs[-1].endswith((":", " to", " statements")):
        paragraphs.pop()
    limit = 420 if entry.kind == "topic" else 300
    answer = ""
    for paragraph in paragraphs:
        if len(answer) + len(paragraph) > limit:
            break
        answer = f"{answer}\n\n{paragraph}" if answer else paragraph
    head, _, last = answer.rpartition("\n\n")
    if head and last.endswith((":", " to")):
        answer = head  # What it announced, an example, was left out.
    if not answer and paragraphs:  # The first paragraph alone is too long: keep whole sentences.
        answer = paragraphs[0][:limit].rpartition(". ")[0]
        answer += "." if answer else ""
    if len(answer) < 15:
        return None
    if entry.signature and len(entry.signature) <= 90:
        answer += f"\n\nUsage: `{entry.signature}`"
    return answer


def chat_entries(entries: list[Entry]) -> list[tuple[Entry, str]]:
    """Returns the (entry, answer) pairs worth asking about; popular ones several times."""
    pairs = []
    for entry in entries:
        private = any(part.startswith("_") for part in entry.name.split("."))
        answer = None if private else _answer(entry)
        if answer is None:
            continue
        depth = entry.name.count(".") - entry.module.count(".")
        weight = 1
        if entry.module in POPULAR:
            weight = 5 if depth <= 1 or entry.module == "builtins" else 2
        weight = 5 if entry.kind == "topic" else weight
        # Methods of classes in rarely used modules would crowd out what people ask about.
        if weight > 1 or depth <= 1:
            pairs += [(entry, answer)] * weight
    return pairs


def ask(entry: Entry, rng: random.Random) -> str:
    """Returns one of the many ways to ask about an entry."""
    name = entry.name
    if entry.kind == "topic":
        name = name[0].lower() + name[1:] if not name[:2].isupper() else name
    elif entry.kind != "module" and entry.module in POPULAR and rng.random() < 0.1:
        name = name.rpartition(".")[2]
    question = rng.choice(QUESTIONS[entry.kind]).format(
        name=name, module=entry.module or "language"
    )
    return question.lower() if rng.random() < 0.05 and name.islower() else question
