"""Functions that benchmarks share: a description of the machine, medians of interleaved rounds, and
results as JSON files."""

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jaxlib.version

from benchmarks.commits import commit

# The widest first: one name of processor may stand for machines that differ in them.
VECTORS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "asimd")
RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, object]:
    """Returns processor, vector width, cores, load, versions and commit, without which figures are
    meaningless."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    flags = set(_read("/proc/cpuinfo").partition("\nflags")[2].partition("\n")[0].split())
    return {
        "processor": model,
        "vectors": next((name for name in VECTORS if name in flags), "unknown"),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "backend": jax.default_backend(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Returns median, fastest and slowest, in milliseconds."""
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "min_ms": 1e3 * min(seconds),
        "max_ms": 1e3 * max(seconds),
    }


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, object]:
    """Returns the speed: the median over rounds of theirs / ours. 1 is equally fast, and above 1
    ours is faster."""
    ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
    return {
        "speed": statistics.median(ratios),
        "rounds": [round(ratio, 3) for ratio in ratios],
        "ours": summary(ours),
        "theirs": summary(theirs),
    }


def save(name: str, figures: Mapping[str, object]) -> Path:
    """Writes `results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")
    return path


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
