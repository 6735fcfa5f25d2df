"""What a load generator prints is judged by its counts, and the page names every client."""

from pathlib import Path

from tests.http_clients.catalogue import CLIENTS, HERE, ROOT

PRINTED = {
    "vllm": "Successful requests:      10\nFailed requests:      %d\n",
    "guidellm": "completed | elapsed=9 | successful=9 errored=%d incomplete=0 |",
    "aiperf": "complete | completed=10, cancelled=0, errors=%d |",
}


def test_a_load_generator_whose_requests_failed_has_failed() -> None:
    for name, printed in PRINTED.items():
        text = f"begin\n(poisson@4.00): {printed}\nend"
        assert CLIENTS[name].succeeded(text % 0) and not CLIENTS[name].succeeded(text % 1), name
    for count, fine in ((10, True), (9, False)):
        assert CLIENTS["sglang"].succeeded(f"Successful requests:      {count}   \n") is fine


def test_every_client_is_on_the_page_and_every_script_is_a_clients() -> None:
    pages = ("http.md", "benchmark_clients.md")
    page = "".join((ROOT / "docs" / name).read_text() for name in pages)
    for client in CLIENTS.values():
        assert client.package.partition("[")[0] in page
    commands = " ".join(command for client in CLIENTS.values() for command in client.commands)
    scripts = {path.name for path in Path(HERE).glob("*_client.py")}
    assert scripts and all(script in commands for script in scripts)
