"""Where the shipped model lies. Imports nothing heavy."""

from pathlib import Path

SHIPPED_MODEL = str(Path(__file__).resolve().parent.parent / "models" / "tiny" / "llama")
