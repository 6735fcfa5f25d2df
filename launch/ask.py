"""Sends a prompt to a server over gRPC and streams the answer.

    jdisagg ask --target=localhost:8700 --prompt="Once upon a time"

The answer goes to stdout, and one line of timings to stderr. --prompt=- reads the prompt from
stdin. --chat sends the prompt as a user message, which the server formats with the model's chat
template. For sampling flags that are not given, the server's defaults apply. The server's default
temperature is 1."""

import sys
import time

from jdisagg.client import ChatMessage, Client, GenerateOptions
from jdisagg.errors import ConfigError, JdisaggError
from launch.console import run
from launch.flags import CLIENT, SAMPLING, define
from launch.settings import credentials

flags = define(
    *(*CLIENT, "token_file", "deadline_seconds", *SAMPLING),
    *("prompt", "system", "min_tokens", "stop", "n"),
    required=("prompt",),
    token_file="",
    prompt=(None, "Prompt text. '-' reads it from stdin."),
)


def main() -> None:
    if flags.system is not None and not flags.chat:
        raise ConfigError(f"--system={flags.system!r:.80} needs --chat")
    prompt = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    with Client(flags.target, credentials=credentials(flags, flags.token_file)) as client:
        _ask(client, prompt)


def _ask(client: Client, prompt: str) -> None:
    options = GenerateOptions(
        max_tokens=flags.max_tokens,
        min_tokens=flags.min_tokens,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        seed=flags.seed,
        stop=flags.stop,
        ignore_eos=flags.ignore_eos,
        n=flags.n,
        deadline_seconds=flags.deadline_seconds,
    )
    if flags.chat:
        system = [ChatMessage("system", flags.system)] if flags.system else []
        options["messages"] = [*system, ChatMessage("user", prompt)]
    texts = [""] * max(1, flags.n)
    report = "no usage came with the stream"
    started = time.perf_counter()
    try:
        for event in client.generate(None if flags.chat else prompt, **options):
            texts[event.child] += event.text
            if flags.n == 1:
                print(event.text, end="", flush=True)
            if event.usage is not None and event.timings is not None:
                timings, seconds = event.timings, time.perf_counter() - started
                report = (
                    f"{event.usage.prompt_tokens} + {event.usage.completion_tokens} tokens, TTFT"
                    f" {timings.ttft_seconds * 1e3:.0f} ms, TPOT {timings.tpot_seconds * 1e3:.1f}"
                    f" ms, {timings.kv_bytes_moved} KV bytes moved, {seconds:.2f} s in all"
                )
    except JdisaggError:
        if flags.n == 1 and texts[0]:
            # the error starts on a line of its own
            print(file=sys.stderr)
        raise
    print("" if flags.n == 1 else "\n\n".join(texts))
    print(report, file=sys.stderr)


if __name__ == "__main__":
    run(main, flags)
