"""What is known of a separate drafter (`--draft`) before it is loaded, from its config.json."""

import json
from pathlib import Path


def keeps_kv(draft: str | Path) -> bool:
    """Whether a drafter computes KV of its own, as an EAGLE-3 head does. An assistant reads the
    KV of the model's layers."""
    try:
        fields = json.loads((Path(draft) / "config.json").read_text())
    except (OSError, ValueError):
        return True  # reported when it is loaded
    kind = fields.get("model_type") if isinstance(fields, dict) else ""
    return not str(kind).endswith("_assistant")
