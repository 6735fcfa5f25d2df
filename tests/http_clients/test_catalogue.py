"""What a load generator prints is judged by its counts, and the page names every client."""

from pathlib import Path

import pytest

from tests.http_clients.catalogue import CLIENTS, HERE, ROOT


@pytest.mark.parametrize(
    ("name", "fine", "faulty"),
    [
        (
            "vllm",
            "Successful requests:      10\nFailed requests:      0\n",
            "Successful requests:      10\nFailed requests:      1\n",
        ),
        ("sglang", "Successful requests:      10   \n", "Successful requests:      9   \n"),
        (
            "guidellm",
            "(poisson@4.00): completed | elapsed=9 | successful=9 errored=0 incomplete=0 |",
            "(poisson@4.00): completed | elapsed=9 | successful=9 errored=1 incomplete=0 |",
        ),
        (
            "aiperf",
            "complete | completed=10, cancelled=0, errors=0 |",
            "complete | completed=10, cancelled=0, errors=2 |",
        ),
    ],
)
def test_a_load_generator_whose_requests_failed_has_failed(
    name: str, fine: str, faulty: str
) -> None:
    assert CLIENTS[name].succeeded(f"begin\n{fine}\nend")
    assert not CLIENTS[name].succeeded(f"begin\n{faulty}\nend")


def test_every_client_is_on_the_page_and_every_script_is_a_clients() -> None:
    pages = ("http.md", "benchmark_clients.md")
    page = "".join((ROOT / "docs" / name).read_text() for name in pages)
    for client in CLIENTS.values():
        assert client.package.partition("[")[0] in page
    commands = " ".join(command for client in CLIENTS.values() for command in client.commands)
    scripts = {path.name for path in Path(HERE).glob("*_client.py")}
    assert scripts and all(script in commands for script in scripts)
