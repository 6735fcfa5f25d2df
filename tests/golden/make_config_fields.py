"""Lists the fields of transformers' configurations of all served families, with their defaults and
other names, in `tests/models/config_fields.json`.

Run in the environment of `tests/golden/make.py`: `python -m tests.golden.make_config_fields`. The
classes are parsed and not imported: their defaults are literals."""

import ast
import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from models.catalog import FAMILIES
from models.hf_fields import harmless

TABLE = Path(__file__).parent.parent / "models" / "config_fields.json"


def _assigned(line: ast.stmt) -> tuple[str, object]:
    """Name and value of an assignment in a class, if the value is a literal."""
    target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
    value = getattr(line, "value", None)
    if not isinstance(target, ast.Name) or value is None:
        return "", None
    try:
        return target.id, ast.literal_eval(value)
    except ValueError:
        return "", None


def fields_of(configuration: ast.ClassDef) -> dict[str, dict[str, object]]:
    fields: dict[str, object] = {}
    names: dict[str, object] = {}
    for line in configuration.body:
        name, value = _assigned(line)
        if name == "attribute_map" and isinstance(value, dict):
            names = {str(own): usual for own, usual in value.items()}
        elif name == "default_theta" and isinstance(value, float):
            fields["rope_theta"] = value
        elif isinstance(line, ast.AnnAssign) and name and not harmless(name):
            fields[name] = value
    return {"fields": fields, "names": names}


def main() -> None:
    found: dict[str, object] = {}
    package = find_spec("transformers")
    assert package is not None and package.origin is not None
    for path in sorted(Path(package.origin).parent.glob("models/*/configuration_*.py")):
        for part in ast.parse(path.read_text()).body:
            if isinstance(part, ast.ClassDef):
                kind = dict(map(_assigned, part.body)).get("model_type")
                if kind in FAMILIES:
                    found[str(kind)] = fields_of(part)
    rows = [
        f"{json.dumps(kind)}: {json.dumps(found[kind], default=list)}" for kind in sorted(found)
    ]
    families = ",\n".join(rows)
    TABLE.write_text(
        f'{{"transformers": "{version("transformers")}", "families": {{\n{families}\n}}}}\n'
    )


if __name__ == "__main__":
    main()
