"""What would a TPU run of each of our programs? Compiled for it, without one.

    python -m benchmarks.tpu_programs --device=v6e --model=llama-3-8b --layout=dp=1,tp=1 --layers=2
    python -m benchmarks.tpu_programs --write

Prints a JSON line for each program that the executor's own warm-up builds (`TpuCounted`). --write
compiles all `CASES` instead and writes results/tpu_programs.json. A program is right for a TPU when
it copies neither weights nor pages, holds the pages in place, and reads and writes little more than
the weights and pages that it must (`memory_bytes` against `roof_seconds`). Needs
`pip install jax[tpu]`. TPU_PROGRAMS_DUMP=DIR keeps each program's text."""

import datetime
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

from benchmarks.device_programs import Case, compiled_apart, parser_of, print_counts
from benchmarks.tpu_devices import TPU_DEVICES

RESULTS = Path(__file__).parent / "results" / "tpu_programs.json"
STEPS = "decode,updates,blocks"
CASES = (
    Case("v6e", "llama-3-8b", what="decode,updates,blocks,prefill"),
    Case("v6e", "llama-3-8b", "dp=1,tp=8", what=STEPS),
    Case("v6e", "gpt-oss-20b", what=f"{STEPS},prefill"),
    Case("v6e", "gpt-oss-20b", "dp=1,tp=8", what=STEPS),
    Case("v6e", "qwen3-235b-a22b", "dp=1,tp=8", what=f"{STEPS},prefill"),
    Case("v6e", "qwen3-235b-a22b", "dp=16,tp=1,ep=16", what=STEPS),
    Case("v6e", "deepseek-v3", "dp=16,tp=1,ep=16", what=f"{STEPS},prefill"),
    Case("tpu7x", "llama-3-8b", what=STEPS),
    Case("tpu7x", "llama-3-8b", "dp=1,tp=8", what=STEPS),
    Case("tpu7x", "gpt-oss-20b", what=STEPS),
    Case("tpu7x", "qwen3-235b-a22b", "dp=16,tp=1,ep=16", what=STEPS),
    Case("tpu7x", "deepseek-v3", "dp=16,tp=1,ep=16", what=STEPS),
)


def decode_steps(programs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns, for each decode step, its memory traffic and XLA's estimate of its duration,
    both over the roof, and the bytes that it needs beside its arguments."""
    found = {}
    for step in programs:
        if step["program"].startswith("step") and step["roof_seconds"]:
            seconds = step["memory_bytes"] / TPU_DEVICES[step["device"]].memory_bandwidth
            found[" ".join(step[key] for key in ("device", "model", "layout"))] = {
                "traffic over roof": round(seconds / step["roof_seconds"], 3),
                "estimate over roof": round(step["optimal_seconds"] / step["roof_seconds"], 3),
                "temp MB": round(step["temp_bytes"] / 1e6, 1),
                "largest copy MB": round(step["copied_bytes"] / 1e6, 1),
            }
    return found


def write(cases: tuple[Case, ...] = CASES) -> None:
    """Compiles all cases, one after the other, and writes what was found so far after each."""
    programs: list[dict[str, Any]] = []
    for case in cases:
        programs += compiled_apart(case)
        RESULTS.write_text(
            json.dumps(
                {
                    "what": "benchmarks.tpu_programs: programs compiled for a TPU without one; none"
                    " was run. compile_seconds: two cores that others load",
                    "made": {
                        "date": str(datetime.date.today()),
                        "python": platform.python_version(),
                        **{name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
                    },
                    "decode": decode_steps(programs),
                    "programs": programs,
                },
                indent=1,
            )
            + "\n"
        )
        print(f"{case.device} {case.model} {case.layout}: compiled", file=sys.stderr, flush=True)


def main() -> None:
    parser = parser_of(__doc__, ("v6e", "tpu7x"))
    parser.add_argument("--write", action="store_true", help="compile all cases, write the results")
    asked = vars(parser.parse_args())
    if asked.pop("write"):
        write()
    else:
        print_counts(Case(**asked), parser)


if __name__ == "__main__":
    main()
