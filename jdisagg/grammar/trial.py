"""Tries to compile one grammar in a separate process, which `compiler.py` starts as a script. Reads
the grammar in llguidance's form from standard input and prints what is wrong with it.

llguidance recurses over rules, and a grammar may take unbounded time. A hostile grammar ends only
this process, by its stack, memory or time. The tokenizer is one of bytes, because the cost of a
grammar hardly depends on the vocabulary. Imports only the standard library and llguidance, so that
it starts fast."""

import random
import resource
import signal
import sys
import threading

import llguidance

# Smaller than the default of threads, so that a grammar that passes here also passes there.
STACK_BYTES = 1 << 20
MEMORY_BYTES = 256 << 20
PROCESSOR_SECONDS = 0.8
WALK_TOKENS = 64
# A lexer state takes one or two kB.
LEXER_STATES = 50_000


def limits() -> llguidance.LLParserLimits:
    """Returns the limits of a compiled grammar."""
    return llguidance.LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)


def fault(tokenizer: llguidance.LLTokenizer, text: str) -> str:
    """Returns what is wrong with a grammar, found by compiling it and walking along it, or ""."""
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits())
    draw = random.Random(0)
    for _ in range(WALK_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        # Ids beyond the bytes are special tokens, such as the end.
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if not allowed:
            break
        matcher.consume_token(draw.choice(allowed))
    return (matcher.get_error() or "no reason is known") if matcher.is_error() else ""


def main() -> None:
    text = sys.stdin.buffer.read().decode()
    tokenizer = llguidance.LLTokenizer("byte")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    # Start the timer after the imports, so that a slow machine rejects no more than a fast one.
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(fault(tokenizer, text)))
    thread.start()
    thread.join()
    sys.stdout.write(found[0] if found else "not enough memory")


if __name__ == "__main__":
    main()
