"""Finds the commit of a figure in the results. Imports only light modules, so that simulations can
use it.

    python -m benchmarks.commits     # after new results: records the subjects of their commits

A rebase changes the ids of commits. `results/commits.json` therefore has the subject of each commit
whose id is in the results, by which the commit is found again. If neither id nor subject exists any
more, the record's `commit` is the commit that added the figures to this history, and `commit_then`
is the original id. `tests/docs/test_commits.py` checks that every commit can be found."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
TABLE = "commits.json"
_ID = re.compile(r"\b[0-9a-f]{7,40}\b")


def commit(tree: Path = RESULTS.parent) -> str:
    """Returns the short id of a working tree's commit; "unknown" outside a repository."""
    return _git("rev-parse", "--short", "HEAD", tree=tree) or "unknown"


def subject(name: str) -> str:
    """Returns date and first line of a commit's message, by which the commit is found after a
    rebase; "" for an unknown commit."""
    return _git("log", "-1", "--format=%cs %s", name)


def recorded(folder: Path = RESULTS) -> dict[str, list[str]]:
    """Returns the ids under `commit` in the results, with the files that contain them."""
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.json")):
        if file.name != TABLE:
            for name in dict.fromkeys(_ids(json.loads(file.read_text()))):
                found.setdefault(name, []).append(file.name)
    return found


def table(folder: Path = RESULTS) -> dict[str, str]:
    """Returns the subjects of the commits, by the ids in the results. The entry "after" has the
    subject of the current commit."""
    return json.loads((folder / TABLE).read_text())


def history() -> dict[str, str] | None:
    """Returns the subjects of this checkout's commits by full id; None if the history is missing or
    incomplete."""
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return None
    lines = _git("log", "--format=%H %s").splitlines()
    return dict(line.split(" ", 1) for line in lines if " " in line)


def lost(
    ids: Mapping[str, object], subjects: Mapping[str, str], past: Mapping[str, str]
) -> list[str]:
    """Returns the ids that can be found neither by id nor by subject."""
    said = set(past.values())
    return [
        name
        for name in ids
        if subjects.get(name) not in said and not any(one.startswith(name) for one in past)
    ]


def main() -> None:
    past, known = history(), table()
    if past is None:
        sys.exit("this checkout does not have its history: fetch all of it first")
    ids = recorded()
    for name in ids:
        whole = next((one for one in past if one.startswith(name)), None)
        if whole is not None:
            known[name] = past[whole]
    for name in lost(ids, known, past):
        print(f"{name} in {', '.join(ids[name])}: this history has neither it nor its subject")
    kept = {"after": past[_git("rev-parse", "HEAD")]}
    kept |= {name: known[name] for name in sorted(ids) if name in known}
    (RESULTS / TABLE).write_text(json.dumps(kept, indent=1) + "\n")


def _ids(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, held in value.items():
            if key == "commit" and isinstance(held, str):
                yield from _ID.findall(held)
            else:
                yield from _ids(held)
    elif isinstance(value, list):
        for held in value:
            yield from _ids(held)


def _git(*arguments: str, tree: Path = RESULTS.parent) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=tree, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    main()
