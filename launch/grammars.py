"""Compiles grammars for structured output with the tokenizer of a checkpoint. Must not import JAX,
because routers use this module."""

from pathlib import Path

from jdisagg.grammar.compiler import GrammarCompiler, TokenizerText
from models.generation_config import read_object
from models.tokenizer import Tokenizer


def grammar_compiler(directory: str) -> GrammarCompiler | None:
    path = Path(directory) / "tokenizer.json"

    def read() -> TokenizerText:
        eos_ids = Tokenizer.from_directory(directory).eos_ids
        return TokenizerText(path.read_text(encoding="utf-8"), eos_ids, _vocabulary(directory))

    return GrammarCompiler(read) if path.is_file() else None


def _vocabulary(directory: str) -> int:
    fields = read_object(Path(directory) / "config.json")
    inner = fields.get("text_config")
    size = fields.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else 0
