"""Each class name stands for one thing, and constructors take few parameters. The source is read,
not imported."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("jdisagg", "models", "launch", "configs", "tools")
MOST_PARAMETERS = 7

pytestmark = pytest.mark.ci


@cache
def _trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for folder in SHIPPED
        for path in (ROOT / folder).rglob("*.py")
        if "_pb2" not in path.name
    }


def _classes() -> list[tuple[str, ast.ClassDef]]:
    return [
        (path, node)
        for path, tree in _trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]


def test_a_public_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for path, node in _classes():
        if not node.name.startswith("_"):
            places[node.name].append(path)
    assert len(places) > 300
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_constructors_have_at_most_seven_parameters() -> None:
    """Beyond that some of them are one thing that has no name yet. Plain data may have more fields:
    they are given by name and do nothing."""
    counts = {
        f"{path}:{node.lineno} {node.name}": len(arguments.args) + len(arguments.kwonlyargs) - 1
        for path, node in _classes()
        for part in node.body
        if isinstance(part, ast.FunctionDef) and part.name == "__init__"
        for arguments in (part.args,)
    }
    assert len(counts) > 100
    assert not {where: count for where, count in counts.items() if count > MOST_PARAMETERS}


# Words and constructions that readers stumbled over, and what to write instead.
PRIVATE_WORDS = {
    r"KV that stays": "prefix cache",
    r"begins? alike": "shared prefix",
    r"set aside|sets aside": "swapped out, reserved",
    r"doors?": "API, endpoint, peer state",
    r"granules?": "smallest page multiple that both sides share",
    r"rosters?": "membership",
    r"guests?": "temporarily placed request",
    r"lent|lends?": "exported",
    r"farewells?": "drain",
    r"takes? leave": "deregisters, drains",
    r"told|tells?": "notified, reported",
    r"hears?|heard": "receives",
    r"whoever|nobody|whom": "the caller, no process",
    r"what is not there": "limitations",
    r"as one can|as one would": "a plain verb",
    r"so many": "this many, `n`",
    r"of a model that": "models that",
    r"in the hand": "as objects",
    r"left aside|leaves? aside": "ignored",
    r"says? so": "reports it",
    r"(?:^|(?<=[.:] ))Of (?:a|an|all|each|one|the|what|which|them|so)": "a subject and a verb",
    r"None: (?:it|there|nothing|none|no)": "None disables ...",
}
_WORD = {text: re.compile(rf"(?<![\w-])(?:{text})(?![\w-])", re.M) for text in PRIVATE_WORDS}
# Uses that remain in docstrings, by folder. A number may only shrink.
REMAINING: dict[str, int] = {
    "jdisagg/dispatch": 1,
    "jdisagg/executor": 2,
    "jdisagg/layout": 1,
    "jdisagg/messages": 1,
    "jdisagg/node": 1,
    "jdisagg/ops": 1,
    "jdisagg/scheduler": 2,
    "jdisagg/service": 2,
    "jdisagg/simulator": 1,
    "jdisagg/transfer": 9,
}


def private_words(text: str) -> list[str]:
    plain = re.sub(r"(?s)```.*?```|``.*?``|`[^`]*`", "`", text)
    return [
        f"{found[0]!r}: {PRIVATE_WORDS[name]}"
        for name, pattern in _WORD.items()
        for found in pattern.finditer(plain)
    ]


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_pages_use_the_fields_words() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]
    assert len(pages) > 20
    found = {str(page.relative_to(ROOT)): private_words(page.read_text()) for page in pages}
    assert not {page: words for page, words in found.items() if words}


def test_docstrings_use_the_fields_words() -> None:
    """The allowance of a folder may only shrink."""
    counts: Counter[str] = Counter()
    for path, tree in _trees().items():
        parts = Path(path).parts
        folder = "/".join(parts[:2]) if parts[0] == "jdisagg" and len(parts) > 2 else parts[0]
        counts[folder] += sum(len(private_words(text)) for text in _docstrings(tree))
    over = {name: count for name, count in counts.items() if count > REMAINING.get(name, 0)}
    assert not over, f"folders with more private words than allowed: {over}"
