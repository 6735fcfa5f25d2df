"""The commands that the pages show have flags that exist, with values that parse. Nothing runs."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from absl import flags as absl

from launch.__main__ import COMMANDS
from launch.console import parsed
from tests.docs.pages import PAGES, ROOT

Command = tuple[str, ...]


def commands(text: str) -> list[Command]:
    """Commands of the code blocks without a language, their continuation lines joined."""
    found: list[Command] = []
    for block in re.findall(r"(?ms)^```\n(.*?)^```", text):
        for line in block.replace("\\\n", " ").splitlines():
            found += _commands_of(line)
    return found


def mentions(text: str) -> list[Command]:
    """Commands with flags that stand in backticks within prose."""
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    spans = re.findall(r"`(jdisagg \w+ --[^`]*)`", prose)
    return [command for span in spans for command in _commands_of(" ".join(span.split()))]


def _commands_of(line: str) -> list[Command]:
    found: list[Command] = []
    for part in re.split(r"&&|\||;", line):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:  # a quote that a separator cut, or output of a command
            continue
        program = words[0].split("/")[-1] if words else ""
        if "--help" in words:
            continue
        if program == "jdisagg":
            found.append(("jdisagg", *words[1:]))
        elif program == "python" and words[1:2] == ["-m"]:
            found.append(("python", *words[2:]))
    return found


SHOWN = [(page.name, command) for page in PAGES for command in commands(page.read_text())]
WORDS = ("serves", "help")  # a line of output, and what is no module
OURS = [item for item in SHOWN if item[1][0] == "jdisagg" and item[1][1] not in WORDS]
MENTIONED = {command for page in PAGES for command in mentions(page.read_text())}
MODULES = [
    item
    for item in SHOWN
    if item[1][0] == "python" and item[1][1].split(".")[0] in ("benchmarks", "tools", "tests")
]


def test_commands_are_found() -> None:
    assert len(OURS) > 30 and len(MENTIONED) > 5


@pytest.mark.parametrize("command", sorted({item[1] for item in OURS} | MENTIONED), ids=" ".join)
def test_flags_of_a_shown_command_parse(command: Command) -> None:
    assert command[1] in COMMANDS, command
    flags = importlib.import_module(f"launch.{command[1]}").flags
    try:
        rest = parsed(flags, command[1:])
        missing = [name for name in flags.required if not flags.present(name)]
    except absl.Error as error:
        raise AssertionError(f"{' '.join(command)}: {error}") from error
    finally:
        for name in flags.names:
            flags.values[name].unparse()
    assert (rest[1:], command in MENTIONED or missing) in (([], []), ([], True))


@pytest.mark.parametrize("command", sorted({item[1] for item in MODULES}), ids=" ".join)
def test_flags_of_a_shown_module_are_in_its_source(command: Command) -> None:
    path = ROOT.joinpath(*command[1].split("."))
    files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else path.glob("*.py")
    source = "".join(Path(file).read_text() for file in files)
    named = {name for word in command[2:] for name in re.findall(r"^--(\w+)", word)}
    shared = (ROOT / "launch" / "flags.py").read_text()
    assert not [
        name
        for name in named
        if f'"{name}"' not in source and f"--{name}" not in source and f'"{name}"' not in shared
    ]
