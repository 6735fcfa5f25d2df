"""What does disaggregation cost without other load? One request at a time, on a disaggregated
cluster of real processes and on a mixed one.

    python -m benchmarks.low_load --requests=40 --name=low_load

Two clusters (`jdisagg cluster`) with the shipped model run side by side: one prefill and one decode
worker (one device each), and one mixed worker in unified mode (one device). The same prompts are
sent to both in turn, one at a time, over gRPC.

- ttft: time to the first token at the client. The goal is unified + 10 % + 5 ms, because the first
  token does not wait for the transfer.
- gap: time from the first to the second token at the client. The goal is one decode step + 1.5 x
  the bare transfer engine's time for the same bytes + 10 ms.
- step: median of the later gaps."""

import asyncio
import os
import secrets
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.clusters import cluster, ready
from benchmarks.measure import save, summary
from jdisagg.client import AsyncClient
from jdisagg.transfer.transfer_engine import EngineOptions

_REQUESTS = flags.DEFINE_integer("requests", 40, "Of each prompt length, to each cluster.")
_LENGTHS = flags.DEFINE_list("lengths", ["32", "200", "400"], "Prompt lengths, in tokens.")
_CHUNK = flags.DEFINE_integer(
    "prefill_chunk", 512, "Tokens of a chunk: by default each prompt is one, as in unified mode."
)
_TOKENS = flags.DEFINE_integer("tokens", 24, "Tokens out.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")


async def once(client: AsyncClient, prompt: list[int]) -> tuple[float, float, float]:
    """Returns the seconds to the first token, the seconds from the first to the second token, and
    the median of the later gaps."""
    started, times = time.perf_counter(), []
    async for event in client.generate(
        token_ids=prompt, max_tokens=_TOKENS.value, temperature=0.0, ignore_eos=True
    ):
        times += [time.perf_counter()] * len(event.token_ids)
    gaps = np.diff(times)
    return times[0] - started, gaps[0], float(np.median(gaps[1:]))


def bare_seconds(nbytes: int, rounds: int) -> list[float]:
    """Returns the seconds of the transfer engine alone, within this process but over sockets: one
    posting of `nbytes` bytes, pulled until it has arrived."""
    options = EngineOptions()
    sender, receiver = options.start_server(), options.start_server()
    connection = receiver.connect(sender.address())
    device = jax.devices()[0]
    block = jax.device_put(jnp.ones((nbytes,), jnp.uint8), device)
    aval = jax.ShapeDtypeStruct(
        block.shape, block.dtype, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    seconds = []
    for _ in range(rounds + 3):
        number = secrets.randbits(62)
        sender.await_pull(number, [block])
        started = time.perf_counter()
        (array,) = connection.pull(number, [aval])
        while not array.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
            time.sleep(1e-4)
        seconds.append(time.perf_counter() - started)
    return seconds[3:]


async def compare(split: AsyncClient, unified: AsyncClient) -> dict[str, object]:
    rng = np.random.default_rng(0)
    vocabulary, per_token = (
        (await split.model()).vocabulary,
        (await split.model()).kv_bytes_per_token,
    )
    figures: dict[str, object] = {}
    for length in map(int, _LENGTHS.value):
        found: dict[str, list[tuple[float, float, float]]] = {"disaggregated": [], "unified": []}
        for number in range(_REQUESTS.value + 3):
            prompt = rng.integers(3, vocabulary, length).tolist()
            for name, client in (("disaggregated", split), ("unified", unified)):
                measured = await once(client, prompt)
                if number >= 3:
                    found[name].append(measured)
        bare = statistics.median(bare_seconds(length * per_token, 20))
        columns = {
            name: [list(column) for column in zip(*rows, strict=True)]
            for name, rows in found.items()
        }
        ttft, gap, step = (statistics.median(column) for column in columns["disaggregated"])
        unified_ttft, unified_gap, unified_step = (
            statistics.median(column) for column in columns["unified"]
        )
        figures[f"{length} tokens"] = {
            "kv bytes": length * per_token,
            "bare transfer ms": round(1e3 * bare, 2),
            **{
                f"{name} {what}": summary(column)
                for name, three in columns.items()
                for what, column in zip(("ttft", "gap", "step"), three, strict=True)
            },
            "ttft limit ms": round(1e3 * (1.1 * unified_ttft + 5e-3), 2),
            "ttft met": bool(ttft <= 1.1 * unified_ttft + 5e-3),
            "gap limit ms": round(1e3 * (step + 1.5 * bare + 10e-3), 2),
            "gap met": bool(gap <= step + 1.5 * bare + 10e-3),
        }
        print(
            f"{length:4d} tokens: ttft {1e3 * ttft:.2f} ms against {1e3 * unified_ttft:.2f}"
            f" unified; gap {1e3 * gap:.2f} against {1e3 * unified_gap:.2f}; step {1e3 * step:.2f}"
            f" against {1e3 * unified_step:.2f}; bare transfer {1e3 * bare:.2f}",
            flush=True,
        )
    return figures


async def run(split: str, unified: str) -> dict[str, object]:
    async with ready(split) as one, ready(unified) as other:
        return await compare(one, other)


def main(_: list[str]) -> None:
    layouts = ("--prefill=tp=1", "--decode=tp=1", f"--chunk_tokens={_CHUNK.value}")
    os.chdir(Path(__file__).resolve().parents[1])
    with (
        cluster("--prefill_workers=1", "--decode_workers=1", *layouts) as split,
        cluster("--mixed_workers=1", "--set=mode=unified", *layouts) as unified,
    ):
        figures = asyncio.run(run(split, unified))
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
