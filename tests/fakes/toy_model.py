"""A model that one can compute by hand. Its "KV" of a token is (position, token, chain): the chain
is a hash of the whole prefix, so KV read from a page proves for which tokens it was written; the
next token is the chain modulo the vocabulary, moved by seed, child, position and histories where
the sampling says so, and on to what a grammar allows."""

from jdisagg.messages.step_commands import SampleSpec
from jdisagg.prompt.logprobs import PromptLogprobs, PromptToken
from jdisagg.request import Request, TokenLogprobs
from jdisagg.scheduler.sequences import sample_spec
from tests.fakes.toy_grammars import VOCABULARY, next_allowed

Entry = tuple[int, int, int]


def extend(chain: int, token: int) -> int:
    return (chain * 31 + token * 7 + 3) % 1_000_003


def chain_of(tokens: tuple[int, ...]) -> int:
    chain = 1
    for token in tokens:
        chain = extend(chain, token)
    return chain


def choose(
    chain: int, position: int, spec: SampleSpec, outputs: tuple[int, ...]
) -> tuple[int, TokenLogprobs | None]:
    """The token at `position`, given the chain of all tokens before it."""
    sampling, number = spec.sampling, chain
    if not sampling.greedy:
        number += sampling.seed * 17 + spec.child * 101 + position * 29
    if sampling.penalised:
        number += 13 * sum(outputs) + 5 * len(outputs) + sum(spec.prompt_history)
    token = number % VOCABULARY
    if sampling.grammar is not None:
        token = next_allowed(token, spec, outputs)
    while sampling.grammar is None and position < spec.min_position and token in spec.stop_ids:
        token = (token + 1) % VOCABULARY
    return token, None if sampling.logprobs is None else TokenLogprobs(-(chain % 100) / 10)


def score(chain: int, token: int, top: int) -> PromptToken:
    """What the model held of a token of a prompt, given the chain of all before it."""
    likely = tuple((at, -float((chain + at) % 50)) for at in range(top))
    return PromptToken(-((chain + token) % 64) / 8, 1 + (chain + token) % VOCABULARY, likely)


def expected_scores(prompt: tuple[int, ...], top: int) -> PromptLogprobs:
    """The oracle of a prompt's log-probabilities."""
    scores = [score(chain_of(prompt[:at]), prompt[at], top) for at in range(1, len(prompt))]
    return PromptLogprobs.of(top, scores)


def expected_tokens(
    request: Request, child: int, context_tokens: int
) -> tuple[tuple[int, ...], str]:
    """The oracle: what child `child` must deliver (without its stop id), and its finish reason."""
    generated: list[int] = []
    prompt = request.prompt_token_ids
    while True:
        spec = sample_spec(request, child, tuple(generated))
        token, _ = choose(
            chain_of(prompt + tuple(generated)),
            len(prompt) + len(generated),
            spec,
            tuple(generated),
        )
        early = len(generated) < request.sampling.min_tokens and request.sampling.grammar is None
        if token in request.stop_ids and not early:
            return tuple(generated), "stop"
        generated.append(token)
        if (
            len(generated) == request.sampling.max_tokens
            or len(prompt) + len(generated) == context_tokens
        ):
            return tuple(generated), "length"
