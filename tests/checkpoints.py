"""Folders of the tiny checkpoints. This file imports nothing, so that tests without JAX can read
their tokenizers."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY, GOLDEN = ROOT / "models" / "tiny", ROOT / "tests" / "golden"
LLAMA, MOE = TINY / "llama", TINY / "qwen3_moe"
