"""What a grammar lets through over the tokenizer of the shipped model."""

import random

import numpy as np

from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.grammar.matcher import TokenMatcher, mask_words
from jdisagg.request import Grammar, SamplingParams
from launch.grammars import grammar_compiler
from models.tokenizer import Tokenizer
from tests.checkpoints import LLAMA as LLAMA  # re-exported

TOKENIZER = Tokenizer.from_directory(str(LLAMA))
EOS = TOKENIZER.eos_ids
WORDS = mask_words(1280)
LONGEST = 400
KNOWN = grammar_compiler(str(LLAMA))
assert KNOWN is not None
COMPILER: GrammarCompiler = KNOWN


def begin(grammar: Grammar, consumed: list[int] | None = None, **options: object) -> TokenMatcher:
    sampling = SamplingParams(grammar=grammar, **options)
    return COMPILER.matcher(grammar, sampling, EOS, consumed or [])


def allowed(matcher: TokenMatcher) -> list[int]:
    mask = np.zeros(WORDS, np.uint32)
    matcher.fill(mask)
    return bits_of(mask)


def walk(grammar: Grammar, seed: int, **options: object) -> tuple[list[int], bool]:
    """Ids drawn evenly among those allowed; whether the end was reached."""
    draw, matcher = random.Random(seed), begin(grammar, **options)
    ids: list[int] = []
    while len(ids) < LONGEST:
        ids.append(draw.choice(allowed(matcher)))
        if ids[-1] in EOS:
            return ids[:-1], True
        matcher.consume(ids[-1:])
    return ids, False


def text(ids: list[int]) -> str:
    return TOKENIZER.decode(ids)


def ids_of(written: str) -> list[int]:
    """Without the id that begins a prompt."""
    return TOKENIZER.encode(written)[1:]


def bits_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def ends(grammar: Grammar, written: str) -> bool | None:
    """Whether an answer may end with this text; None where no answer begins like it."""
    found = allowed(begin(grammar, ids_of(written)))
    return bool(set(EOS) & set(found)) if found else None
