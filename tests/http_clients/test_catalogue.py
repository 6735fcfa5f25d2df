"""The page names every client."""

from pathlib import Path

from tests.http_clients.catalogue import CLIENTS, HERE, ROOT


def test_every_client_is_on_the_page_and_every_script_is_a_clients() -> None:
    pages = ("http.md", "benchmark_clients.md")
    page = "".join((ROOT / "docs" / name).read_text() for name in pages)
    for client in CLIENTS.values():
        assert client.package.partition("[")[0] in page
    commands = " ".join(command for client in CLIENTS.values() for command in client.commands)
    scripts = {path.name for path in Path(HERE).glob("*_client.py")}
    assert scripts and all(script in commands for script in scripts)
