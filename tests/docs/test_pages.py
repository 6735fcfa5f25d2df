"""The pages hold what they promise: lines that fit, links that lead somewhere, files that exist."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

WIDTH = 120
MOST_LINES = 220  # about five screens
WRAPPED = [*PAGES, *(ROOT / "benchmarks" / name for name in ("LOG.md", "STATUS.md", "README.md"))]
# Paths are given from the root, or from the package where a page says so.
BASES = ("", "jdisagg", "docs")
ENDINGS = "py|md|proto|ipynb|toml"


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WRAPPED, ids=_name)
def test_lines_of_a_page_fit_a_window(page: Path):
    """Targets of links and rows of tables do not count: they cannot be broken."""
    lines = re.sub(r"\]\([^)\s]*\)", "]", page.read_text()).splitlines()
    assert not [line for line in lines if len(line) > WIDTH and not line.startswith("|")]


@pytest.mark.parametrize("page", WRAPPED, ids=_name)
def test_relative_links_lead_to_files_and_headings(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (heading and heading not in _anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=_name)
def test_a_page_opens_with_its_purpose_and_ends_with_its_limitations(page: Path):
    text = page.read_text()
    title, _, rest = text.partition("\n\n")
    assert re.fullmatch(r"# .+", title) and re.match(r"[A-Z`]", rest), title
    assert re.findall(r"(?m)^## (.*)$", text)[-1] == "Limitations"
    assert page.parent.name == "reference" or len(text.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_that_a_page_names_exist(page: Path):
    named = set(re.findall(rf"`([\w./*-]+\.(?:{ENDINGS}))`", _prose(page)))
    named |= set(
        re.findall(r"`((?:jdisagg|tests|models|docs|benchmarks|launch)/[\w/*-]*/)`", _prose(page))
    )
    named.discard("jdisagg/_app/")  # a folder of the wheel
    missing = [name for name in sorted(named) if not _exists(name)]
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=_name)
def test_modules_that_a_page_runs_exist(page: Path):
    run = set(re.findall(r"python -m ([\w.]+)", page.read_text())) - {"launch.NAME"}
    ours = {
        name for name in run if name.split(".")[0] in ("tests", "benchmarks", "tools", "jdisagg")
    }
    missing = [name for name in sorted(ours) if not _is_module(name)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_tests_that_a_page_names_exist(page: Path):
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert named <= _tests()


def test_the_walks_through_the_code_name_what_is_there():
    """Each step of a walk is one file; no file comes twice in a walk, and six are the most."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("\n## Walks through the code\n")[2].partition("\n## ")[0]
    walks = re.split(r"(?m)^\*\*One .*\*\*$", section)[1:]
    assert len(walks) == 4
    for walk in walks:
        steps = re.findall(r"(?m)^\d\. `([\w/]+\.py)`(.*?):", walk.replace("\n   ", " "))
        files = [file for file, _ in steps]
        assert len(files) == len(set(files)) <= 6
        for file, names in steps:
            source = (ROOT / "jdisagg" / file).read_text()
            for name in re.findall(r"`(\w+)`", names):
                assert re.search(rf"(?m)^ *(?:async )?(?:def|class) {name}\b", source), (file, name)


def test_each_entry_of_the_log_is_in_its_index_and_new_ones_have_the_form():
    text = (ROOT / "benchmarks" / "LOG.md").read_text()
    index, _, entries = text.partition("\n## Index\n")
    for title, body in re.findall(r"(?ms)^## (20\d\d-\d\d-\d\d .*?)$(.*?)(?=^## 20|\Z)", entries):
        assert f"[{title}](" in entries, title
        if title[:10] > "2026-11-22":
            parts = [f"**{part}.**" for part in ("Question", "Prediction", "Result", "Decision")]
            assert all(part in body for part in parts), title
    assert "**Question.**" in index


def _prose(page: Path) -> str:
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text())


@cache
def _anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", _prose(page))
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return frozenset(text.strip().replace(" ", "-") for text in plain)


def _exists(name: str) -> bool:
    if any([*(ROOT / base).glob(name.rstrip("/"))] for base in BASES):
        return True
    return "/" not in name and any(name in files for files in _file_names())


@cache
def _file_names() -> tuple[frozenset[str], ...]:
    folders = ("jdisagg", "models", "launch", "benchmarks", "configs", "notebooks", "tests")
    return tuple(
        frozenset(file.name for file in (ROOT / folder).rglob("*.*")) for folder in folders
    )


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@cache
def _tests() -> frozenset[str]:
    sources = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "tests" / "transfer").glob("*.py")]
    return frozenset(
        name for file in sources for name in re.findall(r"def (test_\w+)", file.read_text())
    )
