"""What scripts that run workloads share: what `--mixture=` means (lengths of prompts and answers by weight), and where results may go."""

import math
from collections.abc import Sequence
from pathlib import Path

from jdisagg.errors import ConfigError, WorkloadError
from jdisagg.simulator.workloads import Fixed, Mixture


def mixture(parts: Sequence[str]) -> Mixture:
    """Reads weight:prompt/output of each part; raises WorkloadError."""
    read: list[tuple[float, Fixed]] = []
    for part in parts:
        try:
            weight, _, lengths = part.partition(":")
            prompt, _, output = lengths.partition("/")
            made = (float(weight), Fixed(int(prompt), int(output)))
        except ValueError:
            raise WorkloadError(f"--mixture: {part!r} must have the form weight:prompt/output, such as 0.8:1000/200") from None
        if not (math.isfinite(made[0]) and made[0] > 0 and made[1].prompt_tokens > 0 and made[1].output_tokens > 0):
            raise WorkloadError(f"--mixture: {part!r}: weight, prompt and output must be positive")
        read.append(made)
    return Mixture(tuple(read))


def check_output(path: str | None, kind: str) -> None:
    """For whoever asks before the work. Raises ConfigError where a file of `kind` (".json") cannot be written to `path`; None: to none."""
    if path and not (Path(path).suffix == kind and Path(path).resolve().parent.is_dir()):
        raise ConfigError(f"{path} cannot be written after the run: it must end in {kind}, in a folder that exists")
