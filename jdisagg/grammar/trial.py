"""Tries to compile one grammar, in a process of its own (`judge.py` starts it as a script): reads
it from standard input as llguidance writes it down, and prints what is wrong with it.

llguidance recurses over rules, and lets its caller wait for as long as a grammar takes: a hostile
one ends this process, by its stack, its memory or its time, and no other. The tokenizer is one of
bytes: what a grammar costs hardly depends on the vocabulary. Knows the standard library and
llguidance alone, so that it starts soon."""

import random
import resource
import signal
import sys
import threading

import llguidance

# Below what threads have by default, so that what passes here passes there.
STACK_BYTES = 1 << 20
MEMORY_BYTES = 256 << 20
PROCESSOR_SECONDS = 0.8
WALK_TOKENS = 64
# A state of the lexer takes one or two kB.
LEXER_STATES = 50_000


def limits() -> llguidance.LLParserLimits:
    """What one grammar may cost once it is compiled."""
    return llguidance.LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)


def fault(tokenizer: llguidance.LLTokenizer, text: str) -> str:
    """What is wrong with a grammar, found by compiling it and walking along it; empty where nothing
    is."""
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits())
    draw = random.Random(0)
    for _ in range(WALK_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        # what is no byte is special: the end
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
    # from here on, so that a slow machine refuses no more than a fast one
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(fault(tokenizer, text)))
    thread.start()
    thread.join()
    sys.stdout.write(found[0] if found else "not enough memory")


if __name__ == "__main__":
    main()
