"""Script that `compiler.py` runs in a separate process to compile one grammar. It reads the grammar
in llguidance's form from standard input and prints a description of the error, if any.

llguidance recurses over rules, and a grammar may take unbounded time. A hostile grammar that
exceeds the limits of stack, memory or time ends only this process. The script uses a tokenizer of
single bytes, because the cost of a grammar hardly depends on the vocabulary. Imports only the
standard library and llguidance, so that the process starts fast."""

import random
import resource
import signal
import sys
import threading

import llguidance

# Below the default stack of threads, so that a grammar that passes this test compiles in them.
STACK_BYTES = 1 << 20
MEMORY_BYTES = 256 << 20
PROCESSOR_SECONDS = 0.8
WALK_TOKENS = 64
# A lexer state takes one or two kB.
LEXER_STATES = 50_000


def limits() -> llguidance.LLParserLimits:
    """Returns llguidance's limits of a compiled grammar."""
    return llguidance.LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)


def fault(tokenizer: llguidance.LLTokenizer, text: str) -> str:
    """Compiles a grammar and computes some masks. Returns a description of the error, or ""."""
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits())
    draw = random.Random(0)
    for _ in range(WALK_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        # Ids above 255 are special tokens, such as the end of the text.
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
