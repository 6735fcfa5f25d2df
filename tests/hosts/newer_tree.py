"""A copy of this tree as a later version could be: its protocol has a higher number, and messages
have more fields."""

import ast
import re
import shutil
from pathlib import Path

from jdisagg.messages.packed import PROTOCOL
from tests.hosts.hosts import ROOT

# A message of each kind of connection: router and worker, worker and worker, KV plane.
LONGER = {
    "ports": ("PrefillCall", "PrefillReply", "ReserveCall", "PeerHello", "HandoffSource"),
    "worker_status": ("WorkerStatus",),
    "registry": ("WorkerCard",),
    "kv_plane": ("PullRequest", "Posted"),
}


def newer_tree(folder: Path) -> Path:
    """Writes the copy to `folder` and returns it."""
    for name in ("jdisagg", "launch", "models", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    packed = folder / "jdisagg/messages/packed.py"
    text = packed.read_text(encoding="utf-8")
    changed, count = re.subn(r"(?m)^PROTOCOL = \d+$", f"PROTOCOL = {PROTOCOL + 1}", text)
    assert count == 1
    packed.write_text(changed, encoding="utf-8")
    for module, names in LONGER.items():
        path = folder / f"jdisagg/messages/{module}.py"
        path.write_text(_longer(path.read_text(encoding="utf-8"), names), encoding="utf-8")
    return folder


def _longer(text: str, names: tuple[str, ...]) -> str:
    """Adds a field to classes of a module."""
    lines = text.splitlines()
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    for node in sorted([classes[name] for name in names], key=lambda node: -node.lineno):
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        assert fields[-1].end_lineno is not None
        lines.insert(fields[-1].end_lineno, "    of_a_later_version: tuple[int, ...] = (7,)")
    return "\n".join([*lines, ""])
