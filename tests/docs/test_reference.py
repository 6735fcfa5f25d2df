"""The pages of docs/reference/ are those that tools/reference.py writes from the code."""

from jdisagg.settings.declared import texts_of
from tools import reference


def test_the_committed_pages_are_what_the_script_writes() -> None:
    pages = reference.pages()
    for name in ("flags.md", "configuration.md", "metrics.md"):
        page = (reference.FOLDER / name).read_text(encoding="utf-8")
        assert page == pages[name], f"{name}: run python -m tools.reference"


def test_descriptions_of_settings_are_read_from_their_section() -> None:
    class Sizes:
        """Sizes.

        Attributes:
            pages: Pages per rank. None: as many
                as fit.
            slots: Sequences that decode at once.

        Raises:
            ConfigError: A value is impossible.
        """

    assert texts_of(Sizes) == {
        "pages": "Pages per rank. None: as many as fit.",
        "slots": "Sequences that decode at once.",
    }
