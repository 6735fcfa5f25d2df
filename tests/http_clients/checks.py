"""What the scripts of this folder share. They run under the Python of a client's environment, where
nothing of ours can be imported."""

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable

MODEL = "llama"
KEY = "none"
STORY = "Tell me a story"
# A small model at temperature 1 writes blanks where a grammar lets it; 0 has the same each time.
TOOL_TOKENS = 200
CITIES = ("Rome", "Ulm")


def run(checks: dict[str, Callable[[str], object]]) -> None:
    """Each of a module's functions that begin with `test_`, with the server's URL. Ends with 1
    where one failed."""
    failed = 0
    url = sys.argv[1]
    for name, check in checks.items():
        if not name.startswith("test_"):
            continue
        try:
            result = check(url)
            if inspect.iscoroutine(result):
                asyncio.run(result)
            print(f"ok      {name}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    sys.exit(1 if failed else 0)
