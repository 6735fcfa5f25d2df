"""The command line in real processes: stdout, stderr and exit."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from jdisagg.client import Client
from jdisagg.request import FinishReason
from models.tokenizer import Tokenizer
from tests import time_scale
from tests.end_to_end.clusters import collect, dense_greedy
from tests.lanes import first_ci
from tests.programs import CACHE_FLAG, PROGRAMS
from tests.shapes import LLAMA

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Once upon a time"
SMALL = ("--chunk_tokens=64", "--page_size=16", "--slots_per_rank=4", "--devices=8")
SUMMARY = r"TTFT [\d.]+ ms, TPOT [\d.]+ ms, (\d+) \+ (\d+) tokens, (\d+) KV bytes moved, (\w+) (.+)"


def start(module: str, *flags: str) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, "-m", f"launch.{module}", *flags],
        cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,  # noqa: E501
    )  # fmt: skip


def run(module: str, *flags: str) -> "tuple[int, str, str]":
    """(exit status, stdout, stderr) of a script that ends by itself."""
    return end(start(module, *flags))


def end(process: "subprocess.Popen[str]", seconds: float = 240.0) -> "tuple[int, str, str]":
    try:
        out, err = process.communicate(timeout=time_scale.seconds(seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{process.args} did not end: {process.communicate()}") from None
    return process.returncode, out, err


def oracle(prompt: str, count: int, *, ignore_eos: bool = False) -> tuple[str, int]:
    """Greedy text and its number of tokens."""
    tokenizer = Tokenizer.from_directory(LLAMA)
    ids = tokenizer.encode(prompt)
    tokens = dense_greedy(LLAMA, ids, count)
    if not ignore_eos:
        tokens = tokens[
            : next(
                (index for index, token in enumerate(tokens) if token in tokenizer.eos_ids), count
            )
        ]
    return tokenizer.decode(ids + tokens)[len(tokenizer.decode(ids)) :], len(tokens)


def figures(err: str) -> list[str]:
    """What `generate` says after loading and compiling."""
    every = err.splitlines()
    lines = [line for line in every if ", each device: " not in line]
    assert 1 <= len(every) - len(lines) <= 2, err  # what each mesh takes of its devices
    begins = [line.split()[0] for line in lines[:3]]
    assert begins == ["loading", "compiling", "ready"], err
    return lines[3:]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mode", "layouts"),
    first_ci(
        [
            ("disaggregated", ("--prefill=dp=1,tp=2", "--decode=dp=2,tp=1")),
            ("chunked", ("--decode=dp=1,tp=2",)),
            ("unified", ("--decode=dp=1,tp=1",)),
        ]
    ),
)
def test_generate_prints_the_completion_and_nothing_else(mode: str, layouts: tuple[str, ...]):
    text, tokens = oracle(PROMPT, 40)
    status, out, err = run(
        "generate",
        f"--prompt={PROMPT}",
        "--max_tokens=40",
        f"--mode={mode}",
        *layouts,
        *SMALL,
        CACHE_FLAG,
    )
    assert (status, out) == (0, text + "\n"), err
    lines = figures(err)
    assert len(lines) == 1, err
    summary = re.fullmatch(SUMMARY, lines[0])
    assert summary, err
    assert summary[2] == str(tokens) and summary[4] == mode
    assert (int(summary[3]) > 0) == (mode == "disaggregated")


@pytest.mark.ci
def test_a_file_of_prompts_is_answered_in_order_by_a_converted_checkpoint_under_another_layout(
    tmp_path: Path,
):
    status, out, err = run(
        "convert", f"--source={LLAMA}", f"--destination={tmp_path / 'converted'}"
    )
    assert (status, out) == (0, f"{tmp_path / 'converted'}\n"), err
    prompts = ["Once upon a time", "The dog", "One day, a girl"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    flags = (
        f"--model={tmp_path / 'converted'}",
        f"--prompts_file={tmp_path / 'prompts.txt'}",
        "--max_tokens=20",
        "--ignore_eos",
    )
    status, out, err = run(
        "generate", *flags, "--prefill=dp=2,tp=1", "--decode=dp=1,tp=2", *SMALL, CACHE_FLAG
    )
    assert status == 0, err
    assert out == "".join(oracle(prompt, 20, ignore_eos=True)[0] + "\n" for prompt in prompts)
    lines = figures(err)
    assert [line.split(":")[0] for line in lines[:3]] == ["prompt 1", "prompt 2", "prompt 3"]
    assert re.fullmatch(r"3 prompts in [\d.]+ s", lines[3]) and len(lines) == 4


@pytest.mark.ci
def test_an_interrupted_generate_ends_at_once_and_without_a_word(tmp_path: Path):
    prompts = tmp_path / "prompts"
    # so many that it is far from its end when the signal comes, however late that is
    prompts.write_text(f"{PROMPT}\n" * 64)
    process = start(
        "generate",
        f"--prompts_file={prompts}",
        "--max_tokens=900",
        "--ignore_eos",
        *SMALL,
        CACHE_FLAG,
    )
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    status, out, err = end(process)
    # the figures of those that had ended
    assert status == 130 and all(line.startswith("prompt ") for line in figures(err)), err
    assert len(out) < 32 * 4000


@contextmanager
def serving(*flags: str) -> "Iterator[tuple[subprocess.Popen[str], int]]":
    sizes = {
        "prefill.chunk_tokens": 64,
        "prefill.min_chunk_tokens": 64,
        "decode.chunk_tokens": 64,
        "decode.min_chunk_tokens": 64,
    }
    settings = {**sizes, "decode.slots_per_rank": 4, "warm_up": False}
    process = start(
        "serve",
        "--port=0",
        "--http_port=-1",
        *(f"--set={path}={value}" for path, value in settings.items()),
        *flags,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.fullmatch(r"jdisagg serves llama \(disaggregated\) on 127.0.0.1:(\d+)\n", line)
        if not ready:
            raise AssertionError(f"no ready line but {line!r}: {end(process, 10)}")
        yield process, int(ready[1])
    finally:
        process.kill()
        process.communicate()


@pytest.mark.ci
def test_a_server_streams_to_ask_survives_its_death_and_drains_at_sigterm():
    text, _ = oracle(PROMPT, 40)
    with (
        serving(f"--set=compilation_cache={PROGRAMS}") as (server, port),
        Client(f"localhost:{port}") as client,
    ):
        target = f"--target=localhost:{port}"
        status, out, err = run(
            "ask", target, f"--prompt={PROMPT}", "--max_tokens=40", "--temperature=0"
        )
        assert (status, out) == (0, text + "\n"), err
        assert re.fullmatch(
            r"\d+ \+ \d+ tokens, TTFT \d+ ms, TPOT [\d.]+ ms, \d+ KV bytes moved, [\d.]+ s in"
            r" all\n",
            err,
        ), err

        status, out, err = run("ask", target, f"--prompt={PROMPT}", "--max_tokens=100000")
        assert (status, out) == (1, "")
        assert re.fullmatch(
            r"error: max_tokens=100000 and the prompt's \d+ tokens exceed .*\n", err
        ), err

        with start("ask", target, f"--prompt={PROMPT}", "--max_tokens=900", "--ignore_eos") as left:
            assert left.stdout is not None and left.stderr is not None and left.stdout.read(1)
            left.stdout.close()
            assert (left.wait(time_scale.seconds(60)), left.stderr.read()) == (1, "")
        wait_until_free(client)

        killed = start("ask", target, f"--prompt={PROMPT}", "--max_tokens=900", "--ignore_eos")
        assert killed.stdout is not None and killed.stdout.read(1)
        killed.kill()
        killed.communicate()
        wait_until_free(client)

        events = client.generate(PROMPT, temperature=0, max_tokens=400, ignore_eos=True)
        seen = [next(events)]
        server.send_signal(signal.SIGTERM)
        seen += events
        assert len(collect(seen).tokens[0]) == 400
        assert (
            seen[-1].finish_reason is FinishReason.LENGTH
            and seen[-1].usage
            and seen[-1].usage.completion_tokens == 400
        )
        assert "".join(event.text for event in seen).startswith(text[:40])
        status, out, err = end(server, 60)
        # Beside what its meshes take, what is compiled, also for long, and the line every 10 s in
        # which there was work, it has nothing to say.
        told = (" INFO serve prompt ", ", each device: ", " programs are compiled or loaded ")
        told += (" compiling program ", " compiled in ")
        others = [line for line in err.splitlines() if not any(word in line for word in told)]
        assert (status, out, others) == (0, "", [])


def wait_until_free(client: Client) -> None:
    until = time.monotonic() + time_scale.seconds(30)
    while any(
        status.running or status.handoffs or status.free_pages != status.total_pages
        for status in client.status()
    ):
        assert time.monotonic() < until, client.status()
        time.sleep(0.02)


@pytest.mark.ci
def test_the_second_of_two_equal_prompts_reuses_each_block_of_whichever_worker_had_the_first():
    """With no flag but for few programs: a prompt of one block goes to any worker, and may be
    appended."""
    few = ("--prefill=tp=1", "--decode=tp=1", "--slots_per_rank=1", "--devices=2")
    process = start("serve", "--port=0", "--http_port=0", *few, CACHE_FLAG)
    draw = random.Random(7)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"on (\S+) and (http://\S+)", line)
        assert found, f"it said {line!r}"
        client = openai.OpenAI(base_url=f"{found[2]}/v1", api_key="none", max_retries=0)
        (model,) = client.models.list()

        def ask(prompt: list[int]) -> tuple[str, int]:
            done = client.completions.create(
                model=model.id, prompt=prompt, max_tokens=8, temperature=0
            )
            assert done.usage is not None
            details = done.usage.prompt_tokens_details
            return done.choices[0].text, (details.cached_tokens or 0) if details else 0

        for tokens in (40, 130, 200, 300):
            prompt = [draw.randrange(10, 200) for _ in range(tokens)]
            first, second = ask(prompt), ask(prompt)
            assert (first[1], second[1]) == (0, tokens // 128 * 128), tokens
            assert second[0] == first[0]
    finally:
        process.send_signal(signal.SIGTERM)
        status, _, err = end(process)
    assert status == 0, err
