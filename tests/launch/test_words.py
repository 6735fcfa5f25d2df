"""Words beside the flags are refused by every script, and not passed over."""

from pathlib import Path

import pytest

from jdisagg.errors import ConfigError
from jdisagg.supervisor.supervisor import EXIT_CONFIG
from launch.console import refuse_words
from tests.launch.script_ends import ends

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def test_flags_alone_are_taken_and_words_are_named() -> None:
    refuse_words(["generate"])
    with pytest.raises(
        ConfigError, match=r"flags alone are taken, got 'upon' 'a' 'time'; write --flag=value, and quote a value that has sp"
    ):
        refuse_words(["generate", "upon", "a", "time"])
    with pytest.raises(ConfigError, match=r"'7' \.\.\.; write"):
        refuse_words(["generate", *map(str, range(1000))])


def test_a_script_that_is_given_words_ends_with_one_line() -> None:
    for module, status in (("router", EXIT_CONFIG), ("replay_decisions", 1)):
        (end,) = ends(module, ("--log=x", "stray") if module == "replay_decisions" else ("stray",))
        assert (end.status, end.out) == (status, "")
        assert end.err.startswith("error: flags alone are taken, got 'stray'; ") and end.err.count("\n") == 1


def test_no_script_passes_words_over() -> None:
    mains = {path.stem: text for path in LAUNCH.glob("*.py") if "app.run(main)" in (text := path.read_text(encoding="utf-8"))}
    assert len(mains) > 10
    assert {name for name, text in mains.items() if "refuse_words(argv)" not in text and "no arguments are taken" not in text} == set()
