"""Measures prefill and decode steps on this machine, and fits the cost model to them.

    jdisagg measure_costs --model=DIR --output=this_machine.json

Other commands read the file with --hardware=this_machine.json. The errors of the fit go to stderr
and into the file, for steps that were used for the fit and for steps that were held out.
`jdisagg/node/commands/cost_measurement.py` describes the measurements."""

import asyncio
import dataclasses
import sys
from pathlib import Path

from jdisagg.config import EngineConfig
from jdisagg.costs.fitting import Errors, Observation
from jdisagg.engine.limits import GRANULE_TOKENS
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.node.commands.cost_measurement import (
    Fitted,
    MeasuredSettings,
    describe,
    fit_and_judge,
    measure_ceilings,
    measure_steps,
    notes_of,
)
from jdisagg.node.deployment import prepare_runtime
from jdisagg.node.hardware_files import write_accelerator
from launch.console import run
from launch.cost_inputs import find_geometry
from launch.flags import define
from launch.model import deployment
from launch.shipped import SHIPPED_MODEL

flags = define(
    "model",
    "layout",
    "output",
    "name",
    "dtype",
    "devices",
    "rounds",
    "prompts",
    "batches",
    "steps",
    "memory_gigabytes",
    model="",
    layout="dp=1,tp=1,ep=1",
    output="this_machine.json",
    name="this-machine",
    dtype="float32",
    devices=1,
    steps=32,
)


def main() -> None:
    model, layout = flags.model or SHIPPED_MODEL, Layout.parse(flags.layout)
    shape = dataclasses.replace(find_geometry(model), name=Path(model).resolve().name)
    lengths = _counts("prompts", flags.prompts, GRANULE_TOKENS)
    batches = _counts("batches", flags.batches)
    wanted = MeasuredSettings(
        model, layout, flags.dtype, lengths, batches, flags.rounds, flags.steps
    )
    memory = flags.memory_gigabytes
    wanted.context_tokens(shape)
    if not Path(flags.output).resolve().parent.is_dir():
        raise ConfigError(f"--output={flags.output}: its folder does not exist; make it first")
    prepare_runtime(max(flags.devices, layout.devices), EngineConfig.compilation_cache)
    ceilings = measure_ceilings(flags.dtype)
    steps = asyncio.run(measure_steps(wanted, shape, deployment))
    start = describe(ceilings, flags.name, flags.dtype, memory and memory * 1e9)
    _report(fit_and_judge(start, steps, layout), steps, layout)


def _report(fitted: Fitted, steps: list[Observation], layout: Layout) -> None:
    for seen, error in zip(steps, fitted.errors, strict=True):
        print(
            f"{seen.phase:8} {seen.rows!s:14} measured {seen.seconds * 1e3:8.2f} ms, predicted"
            f" {100 * error:+.1f} %",
            file=sys.stderr,
        )
    inside, held_out = Errors.of(fitted.errors), fitted.held_out
    print(
        f"median error {100 * inside.median:.1f} % in sample, {100 * held_out.median:.1f} % held"
        " out (every other setting)",
        file=sys.stderr,
    )
    write_accelerator(Path(flags.output), fitted.accelerator, notes_of(fitted, steps, layout))
    print(flags.output)


def _counts(flag: str, values: list[str], of: int = 1) -> list[int]:
    try:
        found = [int(value) for value in values]
    except ValueError as error:
        raise ConfigError(f"--{flag} must be whole numbers, got {','.join(values)!r}") from error
    if not found or min(found) < 1:
        raise ConfigError(
            f"--{flag} must be at least one number of at least 1, got {','.join(values)!r}"
        )
    for value in found:
        if value % of:
            raise ConfigError(
                f"--{flag} must be multiples of {of}, got {value}; take {value + of - value % of}"
            )
    return found


if __name__ == "__main__":
    run(main, flags)
