"""Tests that run real programs take the shapes of `tests/shapes.py`: each other set of numbers is a
mesh whose programs are compiled for one test."""

import ast
from collections.abc import Iterator
from pathlib import Path

END_TO_END = Path(__file__).resolve().parent / "end_to_end"
# What a test may state of its own: the model, and what changes few programs or none. Layouts are
# free in a parametrised test, which puts all but the shared ones into the lanes ci and slow.
FREE = {"directory", "dtype", "limits", "warm_up", "speculate", "steps", "prefill", "decode"}
PRESETS = {"FEW_PAGES", "FAMILY", "SEEING"}
OTHERS = {
    "family_storms.py": "few pages for models with short contexts",
    "pictures.py": "chunks that begin within an image",
    "test_kv_dtype.py": "prompts of several chunks, whose roundings are compared",
    "test_layouts.py": "layouts, pages and chunks",
    "test_serve_comes_back.py": "the fewest programs that a start can compile",
    "test_soak.py": "pages for a part of sequences of many lengths",
    "test_stages.py": "groups of layers",
    "test_state_reuse.py": "the fewest programs that a warm-up can compile",
    "test_token_identity.py": "blocks of several groups of layers",
    "test_tpu_forms.py": "pages of a TPU",
    "test_windows.py": "pages and chunks near the length of a window",
}


def own_numbers(call: ast.Call) -> Iterator[str]:
    for one in call.keywords:
        # Stages, and experts on devices of their own, are what their test is about.
        layout = ast.unparse(one.value) if one.arg in ("prefill", "decode") else ""
        literal = layout.startswith("'") and "pp=" not in layout and "ep=" not in layout
        if one.arg is None:
            if ast.unparse(one.value) not in PRESETS:
                yield ast.unparse(one.value)
        elif literal or one.arg not in FREE:
            yield ast.unparse(one)


def test_few_files_have_meshes_of_other_numbers() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(END_TO_END.rglob("*.py")):
        name = str(path.relative_to(END_TO_END))
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "InstanceConfig":
                found.setdefault(name, []).append("InstanceConfig")
            elif node.func.id == "config" and (own := list(own_numbers(node))):
                found.setdefault(name, []).append(", ".join(own))
    unknown = {name: own for name, own in found.items() if name not in OTHERS}
    assert unknown == {}, "take the shapes of tests/shapes.py"
    assert OTHERS.keys() <= found.keys(), "these take the shared shapes by now"
