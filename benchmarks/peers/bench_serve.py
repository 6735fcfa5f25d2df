"""Runs the unchanged `vllm bench serve` of the peer's environment against any server, and renames
its figures."""

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.servers import PEER, VLLM, Sizes
from jdisagg.errors import UnavailableError

Figures = dict[str, float]
# Its "inter-token latency" is the time between two frames.
NAMES = {
    "output_throughput": "tokens_per_second",
    "request_throughput": "requests_per_second",
    "median_ttft_ms": "ttft_p50_ms",
    "p99_ttft_ms": "ttft_p99_ms",
    "median_itl_ms": "tbt_p50_ms",
    "p99_itl_ms": "tbt_p99_ms",
}


class Load(NamedTuple):
    """Prompts of `input` random tokens with answers of `output` tokens, at `rate` requests per
    second (Poisson process; inf sends all at once)."""

    rate: str
    requests: int = 40
    input: int = 512
    output: int = 64
    seed: int = 0


def measured(python: str, url: str, sizes: Sizes, load: Load) -> Figures:
    """Runs the client once. Raises `UnavailableError` if the client or a request failed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        asked = command(python, url, sizes, load, result)
        run = subprocess.run(asked, env=environment, capture_output=True, text=True)
        if run.returncode or not result.exists():
            raise UnavailableError(
                f"vllm bench serve ended with {run.returncode}; its last words:"
                f" {(run.stdout + run.stderr)[-2000:]}"
            )
        return figures(json.loads(result.read_text()), load.requests)


def command(python: str, url: str, sizes: Sizes, load: Load, result: Path) -> list[str]:
    return [
        *(python, str(VLLM), "bench", "serve", "--backend=openai", f"--base-url={url}"),
        *(f"--model={sizes.folder.name}", f"--tokenizer={sizes.folder}", "--dataset-name=random"),
        *(f"--random-input-len={load.input}", f"--random-output-len={load.output}"),
        *("--ignore-eos", "--temperature=0", f"--seed={load.seed}", f"--request-rate={load.rate}"),
        *(f"--num-prompts={load.requests}", "--disable-tqdm", "--save-result"),
        *(f"--result-dir={result.parent}", f"--result-filename={result.name}"),
    ]


def figures(found: Mapping[str, float], requests: int) -> Figures:
    """Returns the figures from the client's output. Raises `UnavailableError` unless all requests
    were served."""
    if found["failed"] or found["completed"] != requests:
        raise UnavailableError(
            f"{found['completed']} of {requests} requests were served and {found['failed']} failed:"
            " figures without them would say nothing; see what the server says"
        )
    return {name: round(float(found[key]), 3) for key, name in NAMES.items()}


def medians(rounds: Sequence[Figures]) -> Figures:
    """Returns the median of each figure over the rounds."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def against_peer(by_server: Mapping[str, Figures]) -> dict[str, Figures]:
    """Returns each server's figures, and its tokens per second divided by the peer's."""
    if PEER not in by_server:
        return {**by_server}
    rate, peer = "tokens_per_second", by_server[PEER]
    return {
        kind: one | {"of_peer": round(one[rate] / peer[rate], 3)} for kind, one in by_server.items()
    }


def storm_figures(idle: Figures, storm: Figures) -> dict[str, object]:
    """Returns the figures of both runs, and the factor by which the long gaps grow during the
    storm."""
    ratio = storm["tbt_p99_ms"] / idle["tbt_p99_ms"]
    return {"idle": idle, "storm": storm, "p99_of_idle": round(ratio, 3)}
