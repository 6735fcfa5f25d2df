"""What makes no sense on a command line is refused and not passed over: words beside the flags, by
every script, and what one flag says that another does not bear out."""

import importlib
import re
from pathlib import Path

import pytest

from jdisagg import __version__
from jdisagg.errors import ConfigError
from jdisagg.supervisor.supervisor import EXIT_CONFIG
from launch import plan, simulate
from launch.__main__ import COMMANDS
from launch.console import parsed, refuse_words
from launch.flags import OBSERVE, define
from launch.settings import observe_config
from tests.launch.script_ends import ends, not_refused

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def test_flags_alone_are_taken_and_words_are_named() -> None:
    given = define("prompt", "model")
    refuse_words(["generate"], given)
    with pytest.raises(ConfigError, match=r"unexpected arguments 'upon' 'a' 'time'; write --flag="):
        refuse_words(["generate", "upon", "a", "time"], given)
    with pytest.raises(ConfigError, match=r"'7' \.\.\.; write"):
        refuse_words(["generate", *map(str, range(1000))], given)
    with pytest.raises(ConfigError, match="'org/name'; a model comes first"):
        refuse_words(["serve", "org/name"], given)


def test_what_makes_no_sense_ends_with_one_line(tmp_path: Path) -> None:
    """A folder as the first argument is the model, and other servers' spellings are read or
    translated."""
    ask = ("--prompt=x",)
    rows = {
        "router": (
            (EXIT_CONFIG, ("--port=0", "stray"), "unexpected argument 'stray'; "),
            (EXIT_CONFIG, ("--set=max_attempts=4",), "limits."),
        ),
        "wake": ((2, ("--target=x:1", "stray"), "unexpected argument 'stray'; "),),
        "ask": (
            (1, (*ask, "--target=localhost"), "must be host:port"),
            (1, (*ask, "--target=http://a:8700"), "must be host:port"),
            (1, (*ask, "--system=be kind"), "--system='be kind' needs --chat"),
            (2, (*ask, "--top-k=x"), "error: flag --top_k=x: "),
            (2, (*ask, "--api-key=x"), "error: --api-key is not a flag of jdisagg; use --token_f"),
            (2, (), "error: --prompt is required; "),
        ),
        "kv_calculator": (
            (1, (str(tmp_path),), str(tmp_path)),
            (2, ("--model=a", "b"), "a model comes first"),
        ),
        "switch_role": (
            (
                1,
                ("--worker=w", "--role=decode", "--deadline_seconds=-1"),
                "--deadline_seconds must not be negative, got -1.0",
            ),
            (
                1,
                ("--target=localhost:1", "--worker=w", "--role=decode"),
                "no router answered at localhost:1; start one with jdisagg",
            ),
        ),
        "cluster": (
            (1, ("--canary_seconds=-1",), "--canary_seconds must not be negative, got -1.0"),
            (2, ("--codec=int3",), "--codec=int3: value should be one of <none|"),
        ),
    }
    for page, given in rows.items():
        statuses = {said: status for status, _, said in given}
        assert not_refused(page, (row[1:] for row in given), statuses.__getitem__) == []


def test_no_script_passes_words_over() -> None:
    mains = {
        path.stem: text
        for path in LAUNCH.glob("*.py")
        if "def main(" in (text := path.read_text(encoding="utf-8")) and path.stem != "__main__"
    }
    assert set(mains) == set(COMMANDS)
    assert {name for name, text in mains.items() if "    run(main, flags" not in text} == set()


def test_a_page_shows_all_its_flags_and_its_version() -> None:
    shown, version = ends("ask", ("--help",), ("--version",))
    assert (shown.status, shown.err) == (0, "") and shown.out.startswith("usage: ")
    for name in ("target", "prompt", "authority", "certificate", "key", "server_name"):
        assert f"--{name}=" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 100
    assert (version.status, version.out) == (0, f"jdisagg {__version__}\n")


def test_a_page_of_many_flags_shows_the_most_used_and_all_on_request() -> None:
    few, every = ends("serve", ("--help",), ("--helpfull",))
    flags = [set(re.findall(r"^  --(?:\[no\])?(\w+)", page.out, re.M)) for page in (few, every)]
    assert flags[0] > {"model", "prefill", "decode", "port", "http_port"} and len(flags[0]) <= 26
    assert len(few.out.splitlines()) < 75 and "\nService:\n" in few.out
    flags[0].remove("helpfull")
    assert flags[1] > flags[0] | {"codec", "tls_key", "set"}
    more = int(re.findall(r"--helpfull \((\d+) more flags", few.out)[0])
    assert more == len(flags[1] - flags[0] - {"version"})


def test_a_flag_lists_the_values_that_its_command_takes() -> None:
    for name in ("serve", "cluster", "worker", "inspect", "calibrate_kv"):
        command = importlib.import_module(f"launch.{name}")
        assert command.flags.help_of("weights").endswith(" One of int8, int4, fp8.")
    for command in (plan, simulate):
        assert command.flags.help_of("weights").endswith(" One of int8, int4, fp8, fp4.")
        assert command.flags.values["weights"].value is None


def test_environment_variables_set_flags_that_are_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JDISAGG_TARGET", "localhost")
    monkeypatch.setenv("JDISAGG_TOP_K", "x")
    asked = ("--prompt=x", "--top-k=1")
    wrong, given, other = ends("ask", ("--prompt=x",), asked, (*asked, "--target=http://a:8700"))
    assert wrong.status == 2 and "--top_k=x: " in wrong.err
    assert "(JDISAGG_TOP_K is set); see" in wrong.err
    assert given.status == 1 and "--target=localhost must be host:port" in given.err
    assert other.status == 1 and "--target=http://a:8700 must be" in other.err


def test_variables_that_kubernetes_sets_for_a_service_named_jdisagg_are_no_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("PORT", "tcp://10.0.0.1:8700"), ("HTTP_PORT", "8001")):
        monkeypatch.setenv(f"JDISAGG_{name}", value)
    given = define("port", "http_port")
    parsed(given, ["serve"])
    assert (given.present("port"), given.http_port) == (False, 8001)


def test_opentelemetrys_variable_is_the_default_of_otlp_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    for text, endpoint in (("", "http://collector:4317"), ("--otlp_endpoint=", "")):
        given = define(*OBSERVE)
        given.values(["serve", *filter(None, [text])])
        assert observe_config(given).otlp_endpoint == endpoint
