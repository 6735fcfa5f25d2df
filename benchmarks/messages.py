"""How many microseconds does it take to make, encode and decode a step command?

    python -m benchmarks.messages [--against=CHECKOUT] --name=messages

There are four commands and results of a busy worker: 32 decoding slots, a chunk of 512 tokens of
two prompts, a block to insert, and the tokens of 32 slots. Each round starts one process of this
checkout and one of the other, in turn. A process reports its fastest of many batches, so that other
load disturbs little. `CHECKOUT` is another commit of this project (`git worktree add`), 1d26cd8 or
later. Commits before the messages were structs encoded them as protocol buffers."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDE, BATCHES, BATCH_SECONDS = "--one-side", 60, 0.004


def one_side() -> dict[str, dict[str, float]]:
    """Returns, by message, the bytes and the microseconds to make, and to encode and decode it.
    Runs in either checkout."""
    sys.path.insert(0, os.getcwd())
    from jdisagg.request import SamplingParams

    # Two trees: names that one of them lacks are nothing that a type checker can follow.
    commands, encode, decode, read = _codec()
    sampling = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, seed=11)
    made: dict[str, tuple[Callable[[], Any], bool]] = {
        "DecodeSteps": (lambda: commands.DecodeSteps(7, 1, (tuple(range(32)),)), True),
        "PrefillChunk": (lambda: chunk(commands, sampling), True),
        "InsertBlock": (
            lambda: commands.InsertBlock(9, 2**40, 0, 3, 512, 500, 512, tuple(range(64)), 2**60),
            True,
        ),
        "DecodeResult": (
            lambda: commands.DecodeResult(7, (tuple((token,) for token in range(900, 932)),)),
            False,
        ),
    }
    figures = {}
    for name, (make, is_command) in made.items():
        message = make()
        data = encode(message)
        back = decode if is_command else read
        assert back(data) == message, name
        figures[name] = {
            "bytes": len(data),
            "make_us": _microseconds(make),
            "encode_decode_us": _microseconds(lambda: back(encode(message))),
        }
    return figures


def _codec() -> tuple[Any, Callable[..., bytes], Callable[..., Any], Callable[..., Any]]:
    """Returns the message classes, and this checkout's functions to encode a message, decode a
    command, and decode a result."""
    try:
        from jdisagg.messages import step_commands
        from jdisagg.messages.packed import Unpacker, pack

        return (
            step_commands,
            pack,
            Unpacker[Any](step_commands.StepCommand),
            Unpacker[Any](step_commands.StepResult),
        )
    except ImportError:  # before the messages were the wire
        from importlib import import_module

        classes = import_module("jdisagg.scheduler.commands")
        wire = import_module("jdisagg.service.wire_commands")

        def encode(message: object) -> bytes:
            if isinstance(message, classes.DecodeResult):
                return wire.result_to_bytes(message)
            return wire.command_to_bytes(message)

        return classes, encode, wire.command_from_bytes, wire.result_from_bytes


def chunk(commands: Any, sampling: object) -> object:
    rows = tuple(
        commands.PrefillRow(
            sequence,
            0,
            sequence * 256,
            tuple(range(1000, 1256)),
            0,
            tuple(range(16)),
            (commands.SampleSpec(0, sampling, (2,)),),
            tuple(commands.OfferSpec(2**40 + group, group, 0, 256) for group in range(4)),
        )
        for sequence in range(2)
    )
    return commands.PrefillChunk(8, 512, rows, 2**60 + 1)


def _microseconds(call: Callable[[], object]) -> float:
    """Returns the microseconds per call of the fastest batch."""
    count = 1
    while True:
        start = time.perf_counter()
        for _ in range(count):
            call()
        if time.perf_counter() - start > BATCH_SECONDS:
            break
        count *= 2
    best = float("inf")
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / count


def _run(tree: Path) -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [sys.executable, __file__, SIDE], cwd=tree, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    from absl import flags

    from benchmarks.measure import save
    from benchmarks.two_trees import in_turn

    ours, theirs, against = in_turn(argv, _run)
    figures: dict[str, object] = {}
    for name in ours[0]:
        row = {key: _median(ours, name, key) for key in ours[0][name]}
        if theirs:
            row |= {f"{key}_before": _median(theirs, name, key) for key in theirs[0][name]}
            row["times_as_fast"] = row["encode_decode_us_before"] / row["encode_decode_us"]
        figures[name] = {key: round(value, 2) for key, value in row.items()}
        print(name, json.dumps(figures[name]))
    if flags.FLAGS.name:
        print(save(flags.FLAGS.name, {"messages": figures, "against": against}))


def _median(rounds: list[dict[str, dict[str, float]]], name: str, key: str) -> float:
    return statistics.median(figures[name][key] for figures in rounds)


if __name__ == "__main__":
    if SIDE in sys.argv:
        print(json.dumps(one_side()))
    else:
        main(sys.argv)
