"""Serves language models in JAX with prefill and decode on separate device meshes.

usage: jdisagg COMMAND [--flag=value ...]; jdisagg COMMAND --help shows all flags of a command
"""

import difflib
import importlib
import sys
from typing import NoReturn

from jdisagg import __version__
from launch import console

COMMANDS = {
    "generate": "one text from a prompt, in this process",
    "serve": "serve a model over gRPC from one process",
    "ask": "stream a completion from a server",
    "cluster": "a router and workers on this host, as processes of their own",
    "router": "a router alone",
    "worker": "a prefill, decode or mixed worker alone",
    "switch_role": "let a worker of a running cluster change its role",
    "plan": "which mode, layouts and counts for a model, hardware and goal",
    "simulate": "a cluster on virtual time",
    "kv_calculator": "what a model's KV weighs, and what moving it takes",
    "measure_costs": "fit the cost model to this machine",
    "replay_trace": "send a trace of requests to a server",
    "replay": "run recorded command streams again, and compare tokens",
    "replay_decisions": "make a router's logged decisions again",
    "trace": "merge timelines into one trace for Perfetto",
    "check_config": "what is wrong with a configuration, before anything is started",
    "inspect": "what a checkpoint is, and whether it can be served",
    "calibrate_kv": "what keys and values are divided by where KV is kept in fp8",
    "convert": "a Hugging Face checkpoint to Orbax form",
}


def main() -> NoReturn:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        print(f"jdisagg {__version__}")
        sys.exit(0)
    if name in console.HELP:
        print((__doc__ or "").strip(), end="\n\n")
        print("\n".join(f"  {command:<17} {text}" for command, text in COMMANDS.items()))
        sys.exit(0)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"error: jdisagg has no command {name!r}; {hint}", file=sys.stderr)
        sys.exit(1)
    del sys.argv[1]
    page = importlib.import_module(f"launch.{name}")
    refused = getattr(page, "REFUSED", 1)
    console.run(page.main, page.flags, program=f"jdisagg {name}", refused=refused)


if __name__ == "__main__":
    with console.quiet_end():
        main()
