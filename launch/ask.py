"""Streams a completion from a server: `python -m launch.ask --target=localhost:8700 --prompt="Once upon a time"`.

The text goes to stdout and nothing else does; one line of timings goes to stderr. `--prompt=-` reads the prompt from stdin;
`--chat` sends it as a user's message through the model's chat template. What is not set is the server's default.
"""

import sys
import time

from absl import app, flags

from jdisagg.client import ChatMessage, Client, GenerateOptions
from jdisagg.errors import ConfigError, JdisaggError
from launch.console import quiet_end, refuse_words
from launch.papers import credentials

_TARGET = flags.DEFINE_string("target", "localhost:8700", "Address of the server, host:port.")
_PROMPT = flags.DEFINE_string("prompt", None, "The prompt; '-' reads it from stdin.", required=True)
_CHAT = flags.DEFINE_bool("chat", False, "Send the prompt as a user's chat message.")
_SYSTEM = flags.DEFINE_string("system", None, "With --chat: the system message.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Most tokens to generate.")
_MIN_TOKENS = flags.DEFINE_integer("min_tokens", None, "Fewest tokens before an end token may come.")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "0 is greedy.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Choose among the k most likely tokens; 0 is all.")
_TOP_P = flags.DEFINE_float("top_p", None, "Choose among the most likely tokens that hold this probability together.")
_SEED = flags.DEFINE_integer("seed", None, "Same seed, same text.")
_STOP = flags.DEFINE_multi_string("stop", [], "A text that ends the stream; may be repeated.")
_IGNORE_EOS = flags.DEFINE_bool("ignore_eos", None, "Go on past the end token.")
_N = flags.DEFINE_integer("n", 1, "How many answers; with more than one they are printed when all have ended.")
_TOKEN_FILE = flags.DEFINE_string("token_file", "", "Our bearer token, where the server asks for one.")
_DEADLINE = flags.DEFINE_float("deadline_seconds", None, "Give up after this long.")


def main(argv: list[str]) -> int:
    try:
        refuse_words(argv)
        if _SYSTEM.value is not None and not _CHAT.value:
            raise ConfigError(f"--system={_SYSTEM.value!r:.80} is a chat's and there is none; give --chat, or leave --system away")
        prompt = sys.stdin.read() if _PROMPT.value == "-" else _PROMPT.value
        with quiet_end(), Client(_TARGET.value, credentials=credentials(_TOKEN_FILE.value)) as client:
            _ask(client, prompt)
    except JdisaggError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _ask(client: Client, prompt: str) -> None:
    options = GenerateOptions(
        max_tokens=_MAX_TOKENS.value,
        min_tokens=_MIN_TOKENS.value,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        seed=_SEED.value,
        stop=_STOP.value,
        ignore_eos=_IGNORE_EOS.value,
        n=_N.value,
        deadline_seconds=_DEADLINE.value,
    )
    if _CHAT.value:
        system = [ChatMessage("system", _SYSTEM.value)] if _SYSTEM.value else []
        options["messages"] = [*system, ChatMessage("user", prompt)]
    texts = [""] * max(1, _N.value)
    report = "no usage came with the stream"
    started = time.perf_counter()
    try:
        for event in client.generate(None if _CHAT.value else prompt, **options):
            texts[event.child] += event.text
            if _N.value == 1:
                print(event.text, end="", flush=True)
            if event.usage is not None and event.timings is not None:
                timings, seconds = event.timings, time.perf_counter() - started
                report = (
                    f"{event.usage.prompt_tokens} + {event.usage.completion_tokens} tokens, TTFT {timings.ttft_seconds * 1e3:.0f} ms, "
                    f"TPOT {timings.tpot_seconds * 1e3:.1f} ms, {timings.kv_bytes_moved} KV bytes moved, {seconds:.2f} s in all"
                )
    except JdisaggError:
        if _N.value == 1 and texts[0]:
            print(file=sys.stderr)  # what is said of the error does not go on in the text's last line
        raise
    print("" if _N.value == 1 else "\n\n".join(texts))
    print(report, file=sys.stderr)


if __name__ == "__main__":
    app.run(main)
