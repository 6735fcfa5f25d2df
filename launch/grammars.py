"""Structured output for a checkpoint's tokenizer. Routers import this, so it must not load JAX."""

from pathlib import Path

from jdisagg.grammar.compiler import GrammarCompiler, TokenizerText
from models.tokenizer import Tokenizer


def grammar_compiler(directory: str) -> GrammarCompiler | None:
    """Returns the grammar compiler of a checkpoint, or None without a tokenizer.json. The file is
    read when the first grammar is compiled."""
    path = Path(directory) / "tokenizer.json"

    def read() -> TokenizerText:
        eos_ids = Tokenizer.from_directory(directory).eos_ids
        return TokenizerText(path.read_text(encoding="utf-8"), eos_ids)

    return GrammarCompiler(read) if path.is_file() else None
