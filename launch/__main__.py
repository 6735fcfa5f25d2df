"""Serves large language models in JAX with prefill and decode on separate device meshes.

usage: jdisagg COMMAND [--flag=value ...]
       jdisagg COMMAND --help
"""

import difflib
import importlib
import sys
from typing import NoReturn

from jdisagg import __version__
from launch import console

GROUPS = {
    "Run": {
        "generate": "complete a prompt in this process",
        "serve": "serve a model from one process, over gRPC and an OpenAI-compatible API",
        "run_batch": "answer the requests of a batch file",
        "ask": "send a prompt to a server and stream the answer",
    },
    "Cluster": {
        "cluster": "start a router and workers on this host, and supervise them",
        "router": "start a router",
        "worker": "start a prefill, decode or mixed worker",
        "switch_role": "change the role of a running worker",
        "update_weights": "replace the weights of running workers",
        "sleep": "free the weights and pages of workers",
        "wake": "end the sleep of workers",
    },
    "Plan": {
        "guide": "compare unified, chunked and disaggregated serving on a web page",
        "plan": "find the mode, layouts and worker counts for a model, hardware and objective",
        "simulate": "simulate a cluster in virtual time",
        "kv_calculator": "compute KV sizes and transfer times",
        "measure_costs": "fit the cost model to this machine",
        "replay_trace": "send the requests of a trace to a server and measure it",
    },
    "Inspect": {
        "inspect": "check whether a checkpoint can be served, and show its sizes",
        "check_config": "check a configuration without starting anything",
        "calibrate_kv": "compute scaling factors for an fp8 KV cache",
        "convert": "convert a Hugging Face checkpoint to Orbax form",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}


def main() -> NoReturn:
    arguments = sys.argv[1:]
    name = arguments[0] if arguments else ""
    if name == "help" and arguments[1:]:  # jdisagg help serve
        sys.argv[1:] = [name := arguments[1], "--help"]
    if name == "--version":
        print(f"jdisagg {__version__}")
        sys.exit(0)
    if name in (*console.HELP, "help", ""):
        print(_overview(), file=sys.stdout if name else sys.stderr)
        sys.exit(0 if name else console.USAGE)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else "jdisagg help lists the commands"
        print(f"error: jdisagg has no command {name!r}; {hint}", file=sys.stderr)
        sys.exit(console.USAGE)
    del sys.argv[1]
    module = importlib.import_module(f"launch.{name}")
    refused = getattr(module, "REFUSED", 1)
    console.run(module.main, module.flags, program=f"jdisagg {name}", refused=refused)


def _overview() -> str:
    lines = [(__doc__ or "").strip()]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<17}{text}" for name, text in group.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    with console.quiet_end():
        main()
