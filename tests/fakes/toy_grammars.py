"""Grammars of the toy model: its tokens are the characters from the blank on, the last one ends."""

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jdisagg.grammar.compiler import GrammarCompiler, TokenizerText
from jdisagg.grammar.matcher import mask_words
from jdisagg.messages.step_commands import SampleSpec
from jdisagg.request import Grammar, GrammarKind

VOCABULARY = 97
END = VOCABULARY - 1
FIRST = ord(" ")


def toy_grammar(kind: GrammarKind, text: str) -> Grammar:
    """Compiled, so that workers need not wait for it in virtual time."""
    grammar = Grammar(kind, text)
    GRAMMARS._find(grammar)
    return grammar


def toy_text(token_ids: tuple[int, ...]) -> str:
    return "".join(chr(FIRST + token_id) for token_id in token_ids)


def next_allowed(token: int, spec: SampleSpec, outputs: tuple[int, ...]) -> int:
    """The first token from this one on, around the vocabulary, that the grammar allows behind the
    outputs."""
    allowed = _allowed(spec, outputs)
    assert len(allowed), "the outputs do not follow the grammar"
    return int(next((one for one in allowed if one >= token), allowed[0]))


def is_forced(token: int, spec: SampleSpec, outputs: tuple[int, ...]) -> bool:
    """Whether a step may take this token, the newest output, beside the one that it chooses."""
    if spec.sampling.grammar is None:
        return False
    return token not in spec.stop_ids and len(_allowed(spec, outputs[:-1])) == 1


def _allowed(spec: SampleSpec, outputs: tuple[int, ...]) -> np.ndarray:
    grammar = spec.sampling.grammar
    assert grammar is not None
    mask = np.zeros(mask_words(VOCABULARY), np.uint32)
    GRAMMARS.matcher(grammar, spec.sampling, spec.stop_ids, outputs).fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _tokenizer() -> TokenizerText:
    # GPT-2's byte alphabet: printable bytes stand for themselves
    letters = ["Ġ", *map(chr, range(ord("!"), ord("~") + 1)), "ġ"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={letter: at for at, letter in enumerate(letters)} | {"<end>": END}, merges=[]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return TokenizerText(backend.to_str(), (END,))


GRAMMARS = GrammarCompiler(_tokenizer)
