"""jdisagg: LLM serving in JAX with prefill and decode on separate device meshes.

    from jdisagg import LLM

Importing this package imports neither JAX nor gRPC. `LLM` (`jdisagg/llm.py`) is imported when it is
first used. `docs/architecture.md` describes the folders. The docstring of each folder's
`__init__.py` states what its modules may import."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        return importlib.import_module("jdisagg.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
