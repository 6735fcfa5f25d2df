"""Paths of the shipped model and recipe. Must not import JAX or gRPC."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
SHIPPED_MODEL = str(_ROOT / "models" / "tiny" / "llama")
DEFAULT_RECIPE = str(_ROOT / "configs" / "tiny_cpu.py")
