"""What the scripts of this folder share. They run under the Python of a client's environment, where
nothing of ours can be imported."""

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict

MODEL = "llama"
KEY = "none"
STORY = "Tell me a story"
# A small model at temperature 1 writes blanks where a grammar lets it; 0 has the same each time.
TOOL_TOKENS = 200
CITIES = ("Rome", "Ulm")
CITY = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}}


class Dog(BaseModel):
    """A typed answer."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Rex", "Bo"]
    age: Literal[1, 2, 3]


def strict(reply: BaseModel) -> None:
    """Clients build their objects of whatever comes; this holds a reply against their types."""
    type(reply).model_validate(reply.model_dump(warnings=False, by_alias=True), strict=True)


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
