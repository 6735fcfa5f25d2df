"""Runs other projects' clients against `jdisagg serve` on the shipped model.

    python -m tests.http_clients                         # all of them
    python -m tests.http_clients openai langchain
    python -m tests.http_clients vllm --python=vllm=/opt/vllm/bin/python
    python -m tests.http_clients aiperf --target=http://localhost:8000

A client that is given no --python is installed with pip into an environment of its own under
--environments, which is kept. Without --target a server is started on loopback, of the shipped
model's weights behind a chat template that shows tools. Ends with 1 where anything failed."""

import argparse
import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from launch.notebook_server import start_server
from tests.http_clients.catalogue import CLIENTS, TOKENIZER, Client

CLIENT_SECONDS = 600
LAST_CHARACTERS = 3000
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}<|system|>{{ t | tojson }}<|end|>{% endfor %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.http_clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--target", help="URL of a server, rather than one of its own")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--environments", type=Path, default=Path("~/.cache/jdisagg/clients"))
    options = parser.parse_args()
    if unknown := set(options.names) - set(CLIENTS):
        parser.error(f"{min(unknown)!r} is none of the clients: {', '.join(CLIENTS)}")
    pythons = dict(one.split("=", 1) for one in options.python)

    def failing(url: str) -> list[str]:
        failed: list[str] = []
        for name in options.names or CLIENTS:
            client = CLIENTS[name]
            folder = options.environments.expanduser() / name
            python = pythons.get(name) or installed(client, folder)
            print(f"== {name} {version(client, python)}", flush=True)
            if not all([ran(client, command, python, url) for command in client.commands]):
                failed.append(name)
        return failed

    failed = (
        failing(options.target) if options.target else asyncio.run(on_a_server_of_its_own(failing))
    )
    print(f"failed: {', '.join(failed)}" if failed else "all clients ran without a fault")
    return 1 if failed else 0


async def on_a_server_of_its_own(work: Callable[[str], list[str]]) -> list[str]:
    """What `work` gives for the URL of a server, which ends afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(shutil.copytree(TOKENIZER, Path(scratch) / TOKENIZER.name))
        file = model / "tokenizer_config.json"
        settings = json.loads(file.read_text()) | {"chat_template": TEMPLATE}
        file.write_text(json.dumps(settings))
        server = await start_server(
            f"--model={model}",
            "--prefill=tp=1",
            "--decode=tp=1",
            "--slots_per_rank=8",
            "--set=warm_up=false",  # nothing is timed here
        )
        try:
            return await asyncio.to_thread(work, server.url)
        finally:
            await server.stop()


def installed(client: Client, folder: Path) -> str:
    """The Python of an environment that has the client."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", client.package], check=True)
    return str(python)


def version(client: Client, python: str) -> str:
    package = client.package.partition("[")[0]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return run.stdout.strip() or "(no version)"


def ran(client: Client, command: str, python: str, url: str) -> bool:
    """Runs one command; whether it said that nothing failed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with tempfile.TemporaryDirectory() as scratch:
        words = shlex.split(
            command.format(url=url, python=python, bin=Path(python).parent, scratch=scratch)
        )
        try:
            run = subprocess.run(
                words,
                env=environment,
                cwd=scratch,
                capture_output=True,
                text=True,
                timeout=CLIENT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            print(f"FAILED  not done within {CLIENT_SECONDS} s: {command}", flush=True)
            return False
        said = run.stdout + run.stderr
        fine = run.returncode == 0 and client.succeeded(said)
    if fine:
        checks = re.findall(r"^ok .*", said, re.MULTILINE)
        print("\n".join(checks or [f"ok      {shlex.join(words[1:4])} ..."]), flush=True)
    else:
        print(f"FAILED  {command}\n{said[-LAST_CHARACTERS:]}", flush=True)
    return fine


if __name__ == "__main__":
    sys.exit(main())
