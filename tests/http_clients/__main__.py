"""Runs other projects' clients against `jdisagg serve` on the shipped model.

    python -m tests.http_clients                         # all of them
    python -m tests.http_clients openai langchain
    python -m tests.http_clients vllm --python=vllm=/opt/vllm/bin/python
    python -m tests.http_clients aiperf --target=http://localhost:8000

A client that is given no --python is installed with pip into an environment of its own under
--environments, which is kept. Without --target a server is started on loopback, of the shipped
model's weights behind a chat template that shows tools. Ends with 1 where anything failed."""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.http_clients.catalogue import CLIENTS, ROOT, TOKENIZER, Client

SERVING = re.compile(r"jdisagg serves .* and (http://\S+)")
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
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        url = options.target or stack.enter_context(serving(Path(scratch)))
        for name in options.names or CLIENTS:
            client = CLIENTS[name]
            folder = options.environments.expanduser() / name
            python = pythons.get(name) or installed(client, folder)
            print(f"== {name} {version(client, python)}", flush=True)
            if not all([ran(client, command, python, url) for command in client.commands]):
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all clients ran without a fault")
    return 1 if failed else 0


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of a server of its own, which ends afterwards."""
    model = Path(shutil.copytree(TOKENIZER, folder / TOKENIZER.name))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    command = [sys.executable, "-m", "launch.serve", f"--model={model}", "--port=0"]
    command += ["--http_port=0", "--prefill=tp=1", "--decode=tp=1", "--slots_per_rank=8"]
    command.append("--set=warm_up=false")  # nothing is timed here
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := SERVING.search(line):
                yield found[1]
                return
        raise SystemExit(f"the server ended with {server.wait()} before it served; see above")
    finally:
        server.terminate()
        server.wait(60)


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
