"""Serves an embedded cluster over gRPC (`jdisagg.v1.GenerationService`, health, reflection) until SIGTERM or SIGINT.

    python -m launch.serve
    python -m launch.serve --config=configs/tiny_moe_cpu.py --set decode.slots_per_rank=16 --port=8700

Prints one line on stdout when it is ready. The configuration is a Python file whose `get_config()` returns an `EngineConfig`; --set
changes fields by path. --metrics_port, --timelines and --log_format are in docs/observability.md. On SIGTERM new requests are refused and
running ones finish, within `service.drain_seconds`. Before the line there is nothing to finish: either signal ends it at once, with 130
(SIGINT) or 143 (SIGTERM). When a mesh breaks it ends, too, with 3: what is started in its place can serve.
"""

import asyncio
import os
import sys
from pathlib import Path

from absl import app, flags

from jdisagg.address import host_port
from jdisagg.config import EngineConfig, Mode, override
from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.observe.decision_log import DecisionLog
from jdisagg.observe.logs import configure_logging
from jdisagg.observe.process import ObserveConfig, observing
from jdisagg.service.server import check_address, serve_until_signalled
from jdisagg.supervisor.supervisor import EXIT_BROKEN
from launch.assembly import Deployment, prepare_runtime
from launch.console import quiet_end, refuse_words
from launch.decisions import open_decision_log
from launch.observing import observe_config
from launch.recipes import load_recipe
from launch.signals import end_at_once

DEFAULT_CONFIG = str(Path(__file__).resolve().parent.parent / "configs" / "tiny_cpu.py")

_CONFIG = flags.DEFINE_string("config", DEFAULT_CONFIG, "A recipe: a Python file with get_config().")
_SET = flags.DEFINE_multi_string("set", [], "path.to.field=value, may be repeated.")
_MODEL = flags.DEFINE_string("model", None, "Checkpoint directory; replaces the recipe's.")
_PORT = flags.DEFINE_integer("port", None, "Port; replaces the recipe's. 0 lets the system choose.")
_HARDWARE = flags.DEFINE_string("hardware", None, "What the devices are: h100, ... or a file of launch.measure_costs; for predictions.")
_RECORD = flags.DEFINE_string("record", "", "Folder for recordings of every mesh's commands, for launch.replay; they hold the prompts.")


def main(argv: list[str]) -> None:
    end_at_once()
    try:
        refuse_words(argv)
        config = load_recipe(_CONFIG.value)
        shortcuts = [("model.directory", _MODEL.value), ("service.port", _PORT.value)]
        shortcuts += [("prefill.hardware", _HARDWARE.value), ("decode.hardware", _HARDWARE.value)]
        config = override(config, [*_SET.value, *(f"{path}={value}" for path, value in shortcuts if value is not None)])
        check_address(config.service)
        one_mesh = config.mode is not Mode.DISAGGREGATED
        prepare_runtime(config.decode.layout.devices + (0 if one_mesh else config.prefill.layout.devices), config.compilation_cache)
        observe = observe_config()
        configure_logging(observe.log_format, "serve")
        with quiet_end(), open_decision_log() as decisions:
            broken = asyncio.run(_serve(config, observe, decisions))
    except JdisaggError as error:
        sys.exit(f"error: {error.message}")
    if broken is not None:
        print(f"error: {broken.message}", file=sys.stderr, flush=True)
        os._exit(EXIT_BROKEN)  # JAX's own farewell would wait for programs that may never end


async def _serve(config: EngineConfig, observe: ObserveConfig, decisions: DecisionLog | None) -> UnavailableError | None:
    """Until it is signalled, or a mesh breaks: returns what broke it then."""
    broken: UnavailableError | None = None
    async with observing("serve", observe) as observer:
        deployment = Deployment(config, observer, _RECORD.value)
        if decisions:
            deployment.cluster.path.placing.on_answer = decisions.write
        try:
            await deployment.start()

            def ready(port: int) -> None:
                name = deployment.frontend.model.name
                print(f"jdisagg serves {name} ({config.mode.value}) on {host_port(config.service.host, port)}", flush=True)

            broken = await serve_until_signalled(deployment.frontend, config.service, ready, deployment.cluster.broken)
        finally:
            if broken is None:
                await deployment.cluster.stop()
    return broken


if __name__ == "__main__":
    app.run(main)
