"""Script that `compiler.py` runs in a separate process to validate one grammar.

The script reads from standard input a line of JSON with the vocabulary (`vocabulary_of`), and then
the grammar in llguidance's form. It compiles the grammar and prints a description of the error, if
any.

llguidance recurses over rules, and a grammar may take unbounded time. A hostile grammar that
exceeds the limits of stack, memory or time ends only this process. The vocabulary contains only the
special tokens, which a grammar may use, and the tokens of one byte. Other tokens hardly change the
cost of a grammar, and reading them would take a quarter of a second. The script imports only the
standard library and llguidance, so that the process starts fast.
"""

import json
import random
import resource
import signal
import sys
import threading

import llguidance

# Less than the default stack size of threads, so that a grammar that compiles here also compiles in
# a thread of the server.
STACK_BYTES = 1 << 20
MEMORY_BYTES = 256 << 20
PROCESSOR_SECONDS = 0.8
WALK_TOKENS = 64
# A lexer state takes one or two kB.
LEXER_STATES = 50_000


def limits() -> llguidance.LLParserLimits:
    """Returns llguidance's limits of a compiled grammar."""
    return llguidance.LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)


def vocabulary_of(tokenizer: llguidance.LLTokenizer) -> bytes:
    """Returns the part of a tokenizer that this script needs, as a line of JSON."""
    special: dict[int, str] = {}
    single: dict[int, int] = {}
    for token_id in range(tokenizer.vocab_size):
        given = tokenizer.decode_bytes([token_id])
        if tokenizer.is_special_token(token_id):
            special[token_id] = given.decode("latin-1")
        elif len(given) == 1:
            single.setdefault(given[0], token_id)
    found = {
        "ids": tokenizer.vocab_size,
        "eos_ids": tokenizer.eos_tokens,
        "special": special,
        "single": {token_id: byte for byte, token_id in single.items()},
    }
    return json.dumps(found).encode() + b"\n"


class _Vocabulary:
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, line: bytes) -> None:
        read = json.loads(line)
        self.eos_ids: list[int] = read["eos_ids"]
        self.eos_token_id = self.eos_ids[0]
        self.tokens = [b""] * read["ids"]
        self.special_token_ids = [int(token_id) for token_id in read["special"]]
        self._ids = {byte: int(token_id) for token_id, byte in read["single"].items()}
        for token_id, text in read["special"].items():
            self.tokens[int(token_id)] = text.encode("latin-1")
        # Some bytes occur only within longer tokens. Ids of such tokens represent them here,
        # because llguidance must be able to tokenize any text that a grammar determines.
        taken = {*self.special_token_ids, *self._ids.values()}
        free = (token_id for token_id in range(read["ids"]) if token_id not in taken)
        # 0xFF, which no text has, begins the names of special tokens within llguidance.
        missing = (byte for byte in range(255) if byte not in self._ids)
        self._ids |= dict(zip(missing, free, strict=False))
        for byte, token_id in self._ids.items():
            self.tokens[token_id] = bytes([byte])

    def __call__(self, text: bytes | str) -> list[int]:
        given = text.encode() if isinstance(text, str) else text
        return [self._ids[byte] for byte in given if byte in self._ids]

    def loaded(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(self, eos_token=self.eos_ids, slices=[])  # type: ignore


def fault(tokenizer: llguidance.LLTokenizer, text: str) -> str:
    """Compiles a grammar and computes the masks along a random answer. Returns a description of the
    error, or "" if there is none."""
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits())
    draw, ends = random.Random(0), frozenset(tokenizer.eos_tokens)
    for _ in range(WALK_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        allowed = [
            8 * at + bit
            for at, byte in enumerate(mask)
            if byte
            for bit in range(8)
            if byte >> bit & 1
        ]
        allowed = [token_id for token_id in allowed if token_id not in ends]
        if not allowed:
            break
        matcher.consume_token(draw.choice(allowed))
    return (matcher.get_error() or "no reason is known") if matcher.is_error() else ""


def main() -> None:
    tokenizer = _Vocabulary(sys.stdin.buffer.readline()).loaded()
    text = sys.stdin.buffer.read().decode()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    # The timer starts after the imports, so that a slow machine does not reject more grammars.
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(fault(tokenizer, text)))
    thread.start()
    thread.join()
    sys.stdout.write(found[0] if found else "not enough memory")


if __name__ == "__main__":
    main()
