"""Checks a configuration without starting a server or reading weights. Finds within seconds the
errors that `jdisagg serve` or the workers of `jdisagg cluster` would report after minutes.

    jdisagg check_config --config=configs/llama3_8b_h200.py --model=DIR --device_gib=141
    jdisagg check_config --prefill=tp=4 --decode=dp=4 --model=DIR --token_file=tokens

Checks flags and recipe, the checkpoint, whether both layouts fit the model, certificates, tokens
and ports, and whether the memory of each device is enough. Prints one line for each problem. If
there is none, prints that the model can be served, and the memory plan of each mesh. --device_gib
sets the memory of a device, to check a configuration for another machine. Exit status 1: the
configuration has a problem."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax

from jdisagg.config import EngineConfig, InstanceConfig, Mode
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.engine.embedded import devices_of
from jdisagg.engine.memory_plan import (
    DeviceMemory,
    check_host_cache,
    device_memory,
    fit_engine,
    host_sharers,
)
from jdisagg.engine.prefix_defaults import engine_defaults, fit_with_defaults
from jdisagg.errors import JdisaggError
from jdisagg.node.deployment import memory_fraction, prepare_engine
from jdisagg.node.gpus import DEVICE_FRACTION
from jdisagg.node.hardware_files import find_accelerator
from jdisagg.ops.quantized_weights import checked_weights
from jdisagg.service.server import check_address
from launch.console import run
from launch.flags import ENGINE, HTTP, SERVICE, define, shown
from launch.model import as_kept
from launch.settings import engine_config
from launch.shipped import SHIPPED_MODEL
from models.decoder import abstract_model
from models.inspection import Inspection, bytes_per_device, inspect

flags = define(*ENGINE, *SERVICE, *HTTP, *shown("channel"), "device_gib")


def main() -> int:
    config, problems = engine_config(flags), list[str]()
    directory = Path(config.model.directory or SHIPPED_MODEL).expanduser()
    found = inspect(directory, config.model.draft)
    problems += [f"the checkpoint cannot be served: {text}" for text in found.missing]
    with _noting(problems):
        check_address(config.service)
    plans: list[str] = []
    if _fits_layouts(config, found, problems):
        with _noting(problems):
            plans = _plans(config, found)
    for problem in problems:
        print(f"problem: {problem}")
    if not problems:
        print(f"can be served: {found.where}, {config.mode.value}, {devices_of(config)} devices")
    print("\n".join(plans), end="\n" if plans else "")
    return 1 if problems else 0


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except JdisaggError as error:
        problems.append(error.message)


def _fits_layouts(config: EngineConfig, found: Inspection, problems: list[str]) -> bool:
    if found.config is None:
        return False
    before = len(problems)
    weights = checked_weights(config.model.weights)
    kept = replace(found.config, kv_dtype=config.model.kv_dtype)
    sides = [("decode", config.decode)]
    if config.mode is Mode.DISAGGREGATED:
        sides.insert(0, ("prefill", config.prefill))
    for side, instance in sides:
        try:
            bytes_per_device(kept, instance.layout, config.model.dtype, weights)
        except JdisaggError as error:
            problems.append(f"{side}: {error.message}")
    with _noting(problems):
        abstract_model(kept, dtype=config.model.dtype, weights=weights)
    return len(problems) == before


def _plans(config: EngineConfig, found: Inspection) -> list[str]:
    if found.geometry is None:
        return []
    geometry = as_kept(found.geometry, config.model)
    given, config = config.prefix, engine_defaults(config)
    if flags.device_gib:
        memory = DeviceMemory(
            int(flags.device_gib * (1 << 30) * (memory_fraction(config) or DEVICE_FRACTION)),
            f"of {flags.device_gib:g} GiB",
            "gpu",
        )
    else:
        prepare_engine(config, None)
        devices = jax.devices()[: devices_of(config)]
        check_host_cache(config.prefix, devices[0], memory_fraction(config), host_sharers(config))
        memory = device_memory(devices, memory_fraction(config))
    plans = fit_with_defaults(config, given, lambda whole: fit_engine(whole, geometry, memory))[1]
    sides = [config.prefill, config.decode] if len(plans) > 1 else [config.decode]
    return [
        f"{plan}{_update(geometry, side, config.model.dtype)}"
        for plan, side in zip(plans, sides, strict=True)
    ]


def _update(geometry: CostGeometry, side: InstanceConfig, dtype: str) -> str:
    if not side.hardware:
        return ""
    hardware = find_accelerator(side.hardware)
    costs = CostModel(geometry, hardware, side.layout, dtype=dtype)
    link = hardware.scale_out
    return f", in {costs.update_seconds(link):.2f} s over {link.name}"


if __name__ == "__main__":
    run(main, flags)
