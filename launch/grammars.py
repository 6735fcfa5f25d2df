"""Compiles grammars for structured output with the tokenizer of a checkpoint. Must not import JAX,
because routers use this module."""

from pathlib import Path

from jdisagg.grammar.compiler import GrammarCompiler, TokenizerText
from models.generation_config import read_object
from models.tokenizer import Tokenizer


def grammar_compiler(directory: str) -> GrammarCompiler | None:
    def read() -> TokenizerText:
        tokenizer = Tokenizer.from_directory(directory)
        return TokenizerText(tokenizer.json, tokenizer.eos_ids, _vocabulary(directory))

    has_tokenizer = (Path(directory) / "tokenizer.json").is_file()
    return GrammarCompiler(read) if has_tokenizer else None


def _vocabulary(directory: str) -> int:
    fields = read_object(Path(directory) / "config.json")
    inner = fields.get("text_config")
    size = fields.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else 0
