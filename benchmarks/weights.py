"""What do weights that change cost: adapters in a decode step, and updates of a running cluster?

    python -m benchmarks.weights --parts=adapters,update,pause --rounds=9 --name=weights

Part "adapters": one decode step of the measured model with 32 sequences, without adapter slots,
with 16 slots and rows of the base model, and with 16 adapters of rank 16 in the rows. Interleaved.

Part "update": the measured model (float32) is transferred from a trainer in another process.
"channel": blocks with as many bytes, pulled through the KV channel; the bytes are copied once and
not read. "kept": the same blocks are also verified by a checksum and copied into the
reader's own memory. "update": the weights of a worker with one device are read, verified, converted
and put on the device. The goal is 0.8 of the channel's rate. "processor s" is the time of all
threads of both processes, which a loaded machine changes less than the rates.

Part "pause": `jdisagg cluster` (1 + 1, the shipped model, or with --pause_model=measured the
measured model, whose steps are longer) serves streams, and takes other weights of a checkpoint
folder in each mode. The longest gap between two tokens of any stream around the
update is stated in gaps of the same streams without an update (medians)."""

import asyncio
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from safetensors.numpy import load_file, save_file

from benchmarks import measured_model, plain_loop
from benchmarks.clusters import cluster, ready
from benchmarks.measure import save, summary
from benchmarks.peers.checkpoint import measured_checkpoint
from jdisagg import weights
from jdisagg.client import AsyncClient
from jdisagg.clock import MonotonicClock
from jdisagg.config import InstanceConfig, Mode, ServiceConfig
from jdisagg.engine.host_settings import hand_over_quickly, keep_freed_memory
from jdisagg.engine.replica import build_replica
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.ids import random_id
from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.step_commands import SampleSpec, SlotAdmit
from jdisagg.node import weights_reader
from jdisagg.node.kv_endpoint import TRANSPORTS, KvEndpoint
from jdisagg.ops.checksum import byte_sum
from jdisagg.request import SamplingParams
from jdisagg.transfer.channel import PullTarget
from jdisagg.transfer.in_process import InProcessChannel
from launch.model import loader
from launch.shipped import SHIPPED_MODEL

_PARTS = flags.DEFINE_list("parts", ["adapters", "update", "pause"], "Parts to measure.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Interleaved rounds.")
_STREAMS = flags.DEFINE_integer("streams", 4, "Running streams of part pause.")
_PAUSE_MODEL = flags.DEFINE_enum(
    "pause_model", "shipped", ["shipped", "measured"], "Model of part pause."
)
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

ROWS, ADAPTERS, RANK = 32, 16, 16
PAGE, PAGES, POSITION = 128, 2, 100
BLOCK = weights_reader.BLOCK_BYTES
WINDOW = weights_reader.AHEAD_BYTES // BLOCK
SECONDS = 60.0


# ---- adapters


def decoder(slots: int) -> MeshExecutor:
    """Returns the executor of a decode mesh of one device with adapter slots."""
    config = InstanceConfig(
        slots_per_rank=ROWS,
        page_size=PAGE,
        pages_per_rank=PAGES * ROWS,
        adapters=slots,
        adapter_rank=RANK,
    )
    loaded = measured_model.load(Layout(), jax.devices()[:1])
    channel = InProcessChannel(MonotonicClock())
    role = MeshRole(False, True)
    return build_replica(
        f"slots{slots}", config, Mode.DISAGGREGATED, loaded, role, channel, PAGE * PAGES, 1
    ).executor


def admit(executor: MeshExecutor, adapters: int) -> None:
    """Puts a sequence into each slot. The sequences use `adapters` different adapters."""
    assert executor._decode is not None
    sample = SampleSpec(0, SamplingParams(temperature=0.0))
    rows = [
        SlotAdmit(
            row,
            0,
            row,
            5,
            POSITION,
            PAGE * PAGES,
            (2 * row, 2 * row + 1),
            sample,
            adapter=1 + row % adapters if adapters else 0,
        )
        for row in range(ROWS)
    ]
    executor._decode.update(rows, ())


def step(executor: MeshExecutor) -> float:
    assert executor._decode is not None
    began = time.perf_counter()
    chosen = executor._decode.step((tuple(range(ROWS)),), False)
    jax.block_until_ready([part.token for part in chosen.parts])
    return time.perf_counter() - began


def adapters() -> dict[str, object]:
    plain, slotted = decoder(0), decoder(ADAPTERS)
    if slotted.adapters is not None:
        slotted.adapters.warm_up()
    ways = {
        "base": (plain, 0),
        "slots, base rows": (slotted, 0),
        "16 adapters": (slotted, ADAPTERS),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(_ROUNDS.value + 2):
        for way, (executor, count) in ways.items():
            admit(executor, count)
            took = min(step(executor) for _ in range(3))
            if number >= 2:
                seconds[way].append(took)
    figures: dict[str, object] = {way: summary(each) for way, each in seconds.items()}
    figures["ratios"] = {
        way: round(
            statistics.median(own / base for own, base in zip(each, seconds["base"], strict=True)),
            3,
        )
        for way, each in seconds.items()
    }
    return figures


# ---- updates


def tensors(seed: int) -> dict[str, jax.Array]:
    """Returns the measured model's tensors in Hugging Face's names and shapes, with random
    values."""
    fields = plain_loop.MEASURED_MODEL
    width, ffn, words = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    heads = fields["num_attention_heads"] * fields["head_dim"]
    keys = fields["num_key_value_heads"] * fields["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (words, width),
        "lm_head.weight": (words, width),
        "model.norm.weight": (width,),
    }
    for layer in range(fields["num_hidden_layers"]):
        each = {
            "self_attn.q_proj": (heads, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, heads),
            "mlp.gate_proj": (ffn, width),
            "mlp.up_proj": (ffn, width),
            "mlp.down_proj": (width, ffn),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in each.items()}
    keys_of = jax.random.split(jax.random.key(seed), len(shapes))
    made = {
        name: jax.random.normal(key, shape, jnp.float32) * 0.02
        for key, (name, shape) in zip(keys_of, shapes.items(), strict=True)
    }
    return jax.block_until_ready(made)


def trainer(port: int) -> None:
    """The life of the trainer's process. It takes ("tensors", seed), and offers tensors and replies
    with the offer's name; and ("blocks", ids), and offers a block under each id and replies with
    its endpoint."""
    keep_freed_memory()
    hand_over_quickly()
    parent = Client(("127.0.0.1", port))
    service = ServiceConfig(port=0)
    endpoint = KvEndpoint(service)
    block = jax.device_put(np.ones((1, 1, 1, 1, BLOCK), np.uint8), jax.devices()[0])
    offered: weights.OfferedWeights | None = None
    parent.send("started")
    while (command := parent.recv()) is not None:
        answer: object = None
        match command:
            case ("tensors", seed):
                if offered is not None:
                    offered.close()
                offered = weights.offer(tensors(seed), service=service)
                offered.content()  # an update hashes the values once
                answer = offered.name
            case ("blocks", ids):
                for offer_id in ids:
                    endpoint.channel.offer(offer_id, block, 0)
                answer = endpoint.end
        parent.send(answer)


def channel_seconds(
    link: KvEndpoint, sender: Connection, count: int, kept: np.ndarray | None = None
) -> float:
    """Returns the seconds in which `count` blocks arrive, of which up to `WINDOW` are pulled at a
    time. With `kept` they are verified and copied there."""
    ids = [random_id() for _ in range(count)]
    sender.send(("blocks", ids))
    end = sender.recv()
    assert isinstance(end, KvEnd)
    link.channel.connect("sender", MeshCard((1, 1, 1), (0,), (0,), (end,), TRANSPORTS))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = jax.ShapeDtypeStruct((1, 1, 1, 1, BLOCK), jnp.uint8, sharding=here)
    target = PullTarget(shape, 0, "sender")  # type: ignore[arg-type]
    began = time.perf_counter()
    waiting = [link.channel.pull(one, target, SECONDS) for one in ids[:WINDOW]]
    for number in range(count):
        pull = waiting.pop(0)
        while not pull.is_ready():
            time.sleep(1e-4)
        (arrived,) = pull.arrays()
        if kept is not None:
            block = np.asarray(arrived).reshape(-1)
            byte_sum(block)
            np.copyto(kept[number * BLOCK : number * BLOCK + BLOCK], block)
            del block
        del arrived
        if number + WINDOW < count:
            waiting.append(link.channel.pull(ids[number + WINDOW], target, SECONDS))
    return time.perf_counter() - began


def update(folder: Path) -> dict[str, object]:
    (folder / "config.json").write_text(json.dumps(plain_loop.MEASURED_MODEL))
    load = loader(str(folder), "float32")
    rows: list[tuple[float, float, float]] = []
    processor: list[tuple[float, float]] = []
    with Listener(("127.0.0.1", 0)) as listener:
        port = listener.address[1]  # type: ignore[misc]
        program = f"from benchmarks.weights import trainer; trainer({port})"
        child = subprocess.Popen([sys.executable, "-c", program])
        try:
            sender = listener.accept()
            sender.recv()
            link = KvEndpoint(ServiceConfig(port=0))
            nbytes, own = 0, np.zeros(0, np.uint8)
            for seed in range(_ROUNDS.value + 1):
                sender.send(("tensors", seed))
                name = sender.recv()
                used, began = _processor_seconds(child.pid), time.perf_counter()
                _, model = load.read(name, Layout(), jax.devices()[:1])
                taken = time.perf_counter() - began
                nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(_state(model)))
                between, count = _processor_seconds(child.pid), -(-nbytes // BLOCK)
                bare = channel_seconds(link, sender, count)
                after = _processor_seconds(child.pid)
                if not seed:
                    own = np.zeros(count * BLOCK, np.uint8)
                kept = channel_seconds(link, sender, count, own)
                if seed:
                    rows.append((taken, bare, kept))
                    processor.append((between - used, after - between))
            link.close()
            sender.send(None)
        finally:
            child.terminate()
            child.wait()
    seconds = dict(zip(("update", "channel", "kept"), zip(*rows, strict=True), strict=True))
    figures: dict[str, object] = {"bytes": nbytes}
    for way, each in seconds.items():
        figures[f"{way} GB/s"] = round(nbytes / statistics.median(each) / 1e9, 3)
        figures[f"{way} s"] = [round(one, 3) for one in each]
        ratios = [one / taken for one, taken in zip(each, seconds["update"], strict=True)]
        figures[f"update of {way}"] = round(statistics.median(ratios), 3)
    for way, used in zip(("update", "channel"), zip(*processor, strict=True), strict=True):
        figures[f"processor s, {way}"] = round(statistics.median(used), 3)
    return figures


def _processor_seconds(child: int) -> float:
    """Returns the processor time of this process and of a child that runs."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _state(model: object) -> object:
    from flax import nnx

    return nnx.state(model)


# ---- pauses


async def stream(client: AsyncClient, times: list[float]) -> None:
    async for _ in client.generate(token_ids=range(3, 9), max_tokens=450, ignore_eos=True):
        times.append(time.monotonic())


def gaps(streams: list[list[float]], begin: float, end: float) -> list[float]:
    return [
        later - earlier
        for times in streams
        for earlier, later in itertools.pairwise(times)
        if later >= begin and earlier <= end
    ]


async def pauses(target: str, folders: list[Path]) -> dict[str, object]:
    figures: dict[str, object] = {}
    async with ready(target) as client:
        turn = itertools.cycle(folders)
        for mode in ("keep", "recompute"):
            steps: list[float] = []
            swaps: list[float] = []
            for number in range(_ROUNDS.value):
                streams: list[list[float]] = [[] for _ in range(_STREAMS.value)]
                running = [asyncio.create_task(stream(client, one)) for one in streams]
                while min(map(len, streams)) < 40:
                    for task in filter(asyncio.Task.done, running):
                        task.result()  # raises the error of a stream that failed
                    await asyncio.sleep(0.01)
                calm = gaps(streams, 0.0, time.monotonic())
                began = time.monotonic()
                report = await client.update_weights(str(next(turn)), mode=mode)
                ended = time.monotonic()
                around = gaps(streams, began, ended)
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                if number:  # the first one meets programs that are not loaded yet
                    middle = statistics.median(calm)
                    steps.append(max(around) / middle)
                    swaps.append(report.pause_seconds)
            figures[mode] = {
                "longest gap, in gaps": [round(one, 2) for one in steps],
                "median": round(statistics.median(steps), 2),
                "placement paused, ms": [round(1e3 * one, 1) for one in swaps],
            }
    return figures


def other_weights(model: Path | str, folder: Path, seed: int) -> Path:
    """Copies a model with noise."""
    rng = np.random.default_rng(seed)
    shutil.copytree(model, folder)
    found = load_file(folder / "model.safetensors")
    noisy = {
        name: (one + 0.01 * rng.standard_normal(one.shape)).astype(one.dtype)
        for name, one in found.items()
    }
    save_file(noisy, folder / "model.safetensors")
    return folder


def main(_: list[str]) -> None:
    os.chdir(Path(__file__).resolve().parents[1])
    keep_freed_memory()
    hand_over_quickly()
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if "adapters" in _PARTS.value:
            figures["adapters"] = adapters()
        if "update" in _PARTS.value:
            figures["update"] = update(folder)
        if "pause" in _PARTS.value:
            model = measured_checkpoint() if _PAUSE_MODEL.value == "measured" else SHIPPED_MODEL
            others = [other_weights(model, folder / f"w{seed}", seed) for seed in (1, 2)]
            settings = (f"--model={model}", "--set=model.context_tokens=512")
            settings += ("--chunk_tokens=64", "--page_size=16")
            with cluster("--prefill_workers=1", "--decode_workers=1", *settings) as target:
                figures["pause"] = asyncio.run(pauses(target, others))
    print(json.dumps(figures, indent=1))
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
