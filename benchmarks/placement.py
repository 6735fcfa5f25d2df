"""How long does one placement decision take among a thousand instances?

    python -m benchmarks.placement --name=placement

A thousand instances (half prefill, half decode on two dp ranks, Llama-3-70B on H100, 64 to a rack
of 32 hosts) have random loads. Each round decides for a request of random lengths, charges it to
its workers, and processes one worker's status. For every tenth request, forty workers have cached a
prefix. Three parts are measured separately: the decision, its accounting, and a status. Garbage
collection is off, because its pauses do not belong to a decision. Smaller clusters show which times
do not grow with the number of instances."""

import gc
import random
import statistics
import time

from absl import app, flags

from benchmarks.measure import save
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.costs.speeds import Kind
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.accounts import Accounts, Work
from jdisagg.router.cluster_state import ClusterState, Description
from jdisagg.router.decision import Decision, PlacementPolicy, PlacementQuery
from jdisagg.router.placement import decide

ROUNDS = flags.DEFINE_integer("rounds", 4000, "Decisions of each cluster.")
NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

SIZES = (10, 100, 1000)
MODEL, HARDWARE = geometry("llama-3-70b"), accelerator("h100")
KINDS = {
    WorkerRole.PREFILL: Kind(MODEL, Layout(tp=8), HARDWARE),
    WorkerRole.DECODE: Kind(MODEL, Layout(dp=2, tp=4), HARDWARE),
}
RULES = PlacementPolicy(tpot_slo_seconds=0.05, hold_seconds=1e9)


def status(name: str, role: WorkerRole, draw: random.Random) -> WorkerStatus:
    if role is WorkerRole.PREFILL:
        queued = draw.randrange(0, 8000)
        return WorkerStatus(
            name, role, "tp=8", (8000,), (8000,), 2, 1, 16, 16, 8192,
            queued_tokens=queued, queued_pairs=queued * 1000.0, can_prefill=True, chunk_tokens=2048,
        )  # fmt: skip
    sequences = (draw.randrange(10, 60), draw.randrange(10, 60))
    contexts = (sequences[0] * 1200, sequences[1] * 1200)
    free = (8000 - contexts[0] // 16, 8000 - contexts[1] // 16)
    return WorkerStatus(
        name,
        role,
        "dp=2,tp=4",
        free,
        (8000, 8000),
        sum(sequences),
        0,
        512,
        16,
        8192,
        rank_sequences=sequences,
        rank_contexts=contexts,
    )


def cluster(instances: int, draw: random.Random) -> tuple[Accounts, list[tuple[str, WorkerRole]]]:
    accounts, workers = Accounts(ClusterState()), []
    for number in range(instances):
        role = WorkerRole.PREFILL if number % 2 else WorkerRole.DECODE
        name, host = f"{role.value}-{number}", number // 2
        accounts.state.describe(
            name, Description(f"r{host // 32}/h{host}/d{host}/p{number}", KINDS[role])
        )
        accounts.heard(status(name, role, draw), 0.0)
        workers.append((name, role))
    return accounts, workers


def measure(instances: int, rounds: int) -> dict[str, float]:
    """Returns p50 and p99 of each part, in seconds."""
    draw = random.Random(instances)
    accounts, workers = cluster(instances, draw)
    decisions, charges, words = [], [], []
    for number in range(rounds):
        work = Work(draw.randrange(50, 6000), expected_tokens=draw.randrange(10, 500))
        names = draw.sample(workers, min(40, instances)) if number % 10 == 0 else []
        ask = PlacementQuery(
            work,
            {name: draw.randrange(16, 4000) for name, _ in names},
            limit_seconds=5.0,
            under_way=True,
        )
        spoken = status(*draw.choice(workers), draw)
        started = time.perf_counter()
        answer = decide(accounts.state, ask, 0.0, RULES)
        decided = time.perf_counter()
        assert isinstance(answer, Decision) and answer.terms is not None
        accounts.place(answer.prefill, answer.decode, work, 0.0)
        charged = time.perf_counter()
        accounts.heard(spoken, 0.1)
        decisions.append(decided - started)
        charges.append(charged - decided)
        words.append(time.perf_counter() - charged)
    found = {}
    for what, times in (("decision", decisions), ("account", charges), ("status", words)):
        ranked = statistics.quantiles(times[rounds // 10 :], n=100)
        found |= {f"{what}_p50_seconds": ranked[49], f"{what}_p99_seconds": ranked[98]}
    return found


def main(_: list[str]) -> None:
    gc.disable()
    results = {str(size): measure(size, ROUNDS.value) for size in SIZES}
    for size, found in results.items():
        print(
            f"{size:>5} instances: "
            + ", ".join(
                f"{name.removesuffix('_seconds')} {seconds * 1e6:.0f} us"
                for name, seconds in found.items()
            )
        )
    if NAME.value:
        save(NAME.value, {"rounds": ROUNDS.value, "instances": results})


if __name__ == "__main__":
    app.run(main)
