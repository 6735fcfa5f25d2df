"""What imports what, read from the source text without importing anything."""

import ast
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = {"models", "launch", "configs"}


@contextmanager
def without_collections() -> Iterator[None]:
    """Parsing makes so many objects that most of its time would be collections of garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@without_collections()
def trees_of(paths: Iterable[Path]) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path, module: str) -> Iterator[str]:
    """Returns every name that an import statement anywhere in the file could load."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def import_graph(*packages: str) -> dict[str, set[str]]:
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return {module_name(path): set(imported_names(path, module_name(path))) for path in files}


def reached(graph: dict[str, set[str]], start: str) -> tuple[set[str], dict[str, str]]:
    """Returns our modules reached from `start`, its packages included, and foreign top-level names
    with the module that imports them."""
    ours: set[str] = set()
    foreign: dict[str, str] = {}
    todo = [start]
    while todo:
        module = todo.pop()
        if module in ours:
            continue
        ours.add(module)
        parents = module.split(".")[:-1]
        targets = graph[module] | {".".join(parents[: end + 1]) for end in range(len(parents))}
        for target in targets:
            while target and target not in graph:
                target, last = target.rpartition(".")[0], target
                if not target:
                    foreign.setdefault(last, module)
            if target:
                todo.append(target)
    return ours, foreign


@cache
def product() -> dict[str, set[str]]:
    """Returns the graph of what is shipped. Not at import, which every test worker would pay."""
    return import_graph("jdisagg", *sorted(CLIENTS))
