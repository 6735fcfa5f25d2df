"""The pages of docs/reference/ are those that tools/reference.py writes from the code."""

from tools import reference


def test_the_committed_pages_are_what_the_script_writes() -> None:
    pages = reference.pages()
    for name in ("flags.md", "configuration.md", "metrics.md"):
        page = (reference.FOLDER / name).read_text(encoding="utf-8")
        assert page == pages[name], f"{name}: run python -m tools.reference"
