"""Structured output for a checkpoint's tokenizer. No JAX: routers use it, too."""

from pathlib import Path

from jdisagg.grammar.compiler import GrammarCompiler, TokenizerText
from models.tokenizer import Tokenizer


def grammar_compiler(directory: str) -> GrammarCompiler | None:
    """What compiles grammars for the tokenizer of a checkpoint; None where it has no
    tokenizer.json. Nothing is read before the first one comes."""
    path = Path(directory) / "tokenizer.json"

    def read() -> TokenizerText:
        eos_ids = Tokenizer.from_directory(directory).eos_ids
        return TokenizerText(path.read_text(encoding="utf-8"), eos_ids)

    return GrammarCompiler(read) if path.is_file() else None
