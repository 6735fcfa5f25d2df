"""A session of the research API holds one sequence in the pages of one decode mesh. A cache can be
pushed into the session, tokens can be appended and generated, and the KV can be pulled as a cache.

Between calls the pages hold the KV of every token of `token_ids`. `next_token` is chosen, but its
KV is not computed yet. A call that fails leaves the session unchanged. Sampling supports
temperature, filters and seed, but no penalties or stop strings."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

from jdisagg.engine.research.chunk_runs import Run
from jdisagg.engine.research.instance import ResearchInstance
from jdisagg.engine.research.kv_cache import KVCache, NextToken
from jdisagg.engine.research.meshes import ResearchMeshes
from jdisagg.engine.research.prompt_tokens import Prompt, TextCodec, prompt_tokens
from jdisagg.engine.research.scores import Scores
from jdisagg.engine.research.session_results import Append, Generation, Move
from jdisagg.errors import IncompatiblePeerError, InvalidRequestError
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import SampleSpec
from jdisagg.model_api import Device
from jdisagg.request import FinishReason, SamplingParams
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.transfer.codec import check_codec

GREEDY = SamplingParams(temperature=0.0)


class Session:
    """One sequence in the pages of one decode mesh. Created by `Engine.create_session`. A session
    is a context manager."""

    def __init__(
        self,
        session_id: str,
        meshes: ResearchMeshes,
        tokenizer: TextCodec | None,
        layout: Layout,
        devices: Sequence[Device] | None = None,
        on_close: Callable[["Session"], None] | None = None,
    ) -> None:
        self.session_id = session_id
        self._meshes = meshes
        self._tokenizer = tokenizer
        self._on_close = on_close
        self._instance = self._find(layout, devices)
        self._held: _Held | None = None
        self._closed = False

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = (
            "closed"
            if self._closed
            else f"{len(self._held.tokens)} tokens"
            if self._held
            else "empty"
        )
        devices = ", ".join(str(device.id) for device in self.mesh.devices.flat)
        return f"Session({self.session_id!r}, {self.layout}, {what}, on devices {devices})"

    @property
    def layout(self) -> Layout:
        return self._instance.layout

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._instance.mesh

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self._holding().tokens

    @property
    def next_token(self) -> NextToken:
        """Chosen next token. Raises InvalidRequestError if there is none, as after a push of a
        cache that was sliced, joined or changed."""
        chosen = self._holding().chosen
        if chosen is None:
            raise InvalidRequestError(
                f"session {self.session_id!r} holds a cache that was cut, joined or changed, and no"
                " next token has been chosen; generate, or append"
            )
        return chosen

    @property
    def room_tokens(self) -> int:
        return self._instance.limits.context_tokens - len(self._holding().tokens)

    def push(
        self,
        kv: KVCache,
        target_layout: Layout | str | None = None,
        *,
        devices: Sequence[Device] | None = None,
        codec: str = "none",
    ) -> Move:
        """Transfers a copy of a cache into this session, which drops its previous KV. Each device
        gets only the heads that its shard needs. If the transfer fails, the session is unchanged.

        Args:
            target_layout: Layout of another mesh to move the session to. None keeps the session's
                mesh.
            codec: Name of the codec that packs the transferred values
                (`jdisagg.transfer.codec.CODECS`). It also applies to KV that is already on its
                destination device. With a lossy codec, `pull()` returns values that differ from
                `kv`.

        Raises:
            IncompatiblePeerError: The cache is of another model.
            InvalidRequestError: The cache does not begin at position 0 or exceeds the context, or
                the session is closed.
            ConfigError: The codec does not exist, or cannot pack this KV.
            OverloadedError: The mesh has no pages for it.
        """
        self._check_open()
        target = self._instance
        wanted = self.layout if target_layout is None else Layout.of(target_layout)
        if devices is not None or wanted != self.layout:
            target = self._find(wanted, devices)
        _check_fits(kv, target.limits)
        check_codec(codec, kv.spec)
        channel = self._meshes.channel
        started, moved, planned = (
            time.perf_counter(),
            channel.bytes_per_pair(),
            channel.planned_bytes_per_pair(),
        )
        rank, owner = target.reserve(len(kv))
        try:
            target.receive(kv, rank, owner, codec)
        except BaseException:
            target.ledgers[rank].free(owner)
            raise
        seconds = time.perf_counter() - started
        self._drop()
        self._instance, self._held = target, _Held(rank, owner, kv.token_ids, kv.chosen)
        moved, planned = (
            _minus(channel.bytes_per_pair(), moved),
            _minus(channel.planned_bytes_per_pair(), planned),
        )
        return Move(len(kv), kv.layout, target.layout, codec, moved, planned, seconds)

    def pull(self) -> KVCache:
        """Copies the session's KV to a cache on the same mesh. Raises InvalidRequestError if the
        session holds no KV."""
        held = self._holding()
        return self._instance.extract(held.tokens, held.chosen, held.rank, held.owner)

    def append(self, continuation: Prompt) -> Append:
        """Appends given tokens, such as the user's next message, to the session. Only the new
        tokens are computed. The KV equals that of a prefill of all tokens. The next token is chosen
        greedily. `generate_tokens` with other sampling parameters chooses it again.

        The current `next_token`, such as the end-of-turn token, is not appended. To append it,
        begin `continuation` with this token.

        Args:
            continuation: Text or token ids. The tokenizer adds no start token to text.

        Raises:
            InvalidRequestError: `continuation` is empty, invalid or exceeds the context, or the
                session holds no KV.
            OverloadedError: The mesh has no pages for it.
        """
        held, instance, started = self._holding(), self._instance, time.perf_counter()
        new = self._continued(continuation)
        instance.grow(held.rank, held.owner, len(held.tokens) + len(new))
        choice = replace(GREEDY, logprobs=instance.logprobs_wanted)
        tokens = held.tokens + new
        run = Run(tokens, len(held.tokens), held.rank, held.owner, (SampleSpec(0, choice),))
        instance.compute([run])
        token = replace(run.next_token(), sampling=GREEDY)
        held.tokens, held.chosen = tokens, token
        return Append(new, token, time.perf_counter() - started)

    def score(self, continuation: Prompt, top: int, logits: bool) -> Scores:
        """Computes the log-probabilities of tokens after this session's tokens (see
        `Engine.score`). Recomputes the session's last token."""
        held = self._holding()
        tokens = held.tokens + self._continued(continuation)
        self._instance.grow(held.rank, held.owner, len(tokens))
        run = Run(tokens, len(held.tokens) - 1, held.rank, held.owner, top=top)
        return self._instance.score(run, logits=logits)

    def generate(
        self, sampling: SamplingParams, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Generates tokens until `sampling.max_tokens`, an end-of-text token or the end of the
        context (see `Engine.generate_tokens`)."""
        held = self._holding()
        instance, tokenizer = self._instance, self._tokenizer
        stop_ids = tokenizer.eos_ids if tokenizer and not sampling.ignore_eos else ()
        limit = min(len(held.tokens) + sampling.max_tokens, instance.limits.context_tokens)
        instance.grow(held.rank, held.owner, limit)
        choice, first = replace(choice_of(sampling), logprobs=sampling.logprobs), len(held.tokens)
        spec = SampleSpec(0, choice)
        admit = None
        if held.chosen is None or held.chosen.sampling != choice_of(sampling):
            admit = instance.admit(held.tokens[-1], first - 1, limit, spec, held.rank, held.owner)
            held.choose(instance.decode_step(held.rank, choice, admit))
        step_seconds: list[float] = []
        while len(held.tokens) < limit and self.next_token.token_id not in stop_ids:
            started, token = time.perf_counter(), self.next_token.token_id
            fresh = (
                instance.admit(token, len(held.tokens), limit, spec, held.rank, held.owner)
                if admit is None
                else None
            )
            following = instance.decode_step(held.rank, choice, fresh)
            admit = admit or fresh
            step_seconds.append(time.perf_counter() - started)
            held.tokens += (token,)
            held.choose(following)
            if on_token:
                on_token(token)
        new = held.tokens[first:]
        reason = FinishReason.STOP if len(held.tokens) < limit else FinishReason.LENGTH
        return Generation(
            new,
            tokenizer.decode(new) if tokenizer else "",
            reason,
            tuple(step_seconds),
            self.next_token,
        )

    def close(self) -> None:
        """Frees the session's pages. Idempotent."""
        self._drop()
        self._closed = True
        if self._on_close:
            self._on_close(self)

    def _find(self, layout: Layout, devices: Sequence[Device] | None) -> ResearchInstance:
        return self._meshes.instance(
            layout, self._meshes.devices[-layout.devices :] if devices is None else devices
        )

    def _continued(self, continuation: Prompt) -> tuple[int, ...]:
        vocabulary = self._instance.vocabulary
        new = prompt_tokens(
            continuation, self._tokenizer, vocabulary, continues=True, name="continuation"
        )
        if len(new) > self.room_tokens:
            held = len(self.token_ids)
            raise InvalidRequestError(
                f"continuation has {len(new)} tokens, and with the {held} tokens so far it exceeds"
                f" the context of {held + self.room_tokens}; give at most {self.room_tokens}"
            )
        return new

    def _drop(self) -> None:
        if self._held:
            self._instance.ledgers[self._held.rank].free(self._held.owner)
            self._held = None

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError(f"session {self.session_id!r} is closed; create a new one")

    def _holding(self) -> "_Held":
        self._check_open()
        if self._held is None:
            raise InvalidRequestError(
                f"session {self.session_id!r} holds no KV; push a cache into it first"
            )
        return self._held


@dataclass(slots=True)
class _Held:
    rank: int
    owner: int
    tokens: tuple[int, ...]
    chosen: NextToken | None

    def choose(self, token: NextToken) -> None:
        self.chosen = replace(token, sampling=choice_of(token.sampling))


def choice_of(sampling: SamplingParams) -> SamplingParams:
    """Returns only those sampling parameters that determine which token is chosen. Two tokens were
    chosen in the same way if these parameters are equal."""
    if sampling.greedy:
        return GREEDY
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )


def _check_fits(kv: KVCache, limits: MeshLimits) -> None:
    if kv.spec != limits.kv_spec:
        raise IncompatiblePeerError(
            f"the cache's KV geometry is {kv.spec} and this model's is {limits.kv_spec};"
            " push caches of the same model"
        )
    if kv.first_position:
        raise InvalidRequestError(
            f"the cache begins at position {kv.first_position}: the KV before it is missing,"
            " and its keys are rotated for their positions; append it"
            f" to a cache of positions 0 to {kv.first_position - 1}"
        )
    if len(kv) > limits.context_tokens:
        raise InvalidRequestError(
            f"the cache has {len(kv)} tokens and this engine's context holds"
            f" {limits.context_tokens}; push fewer (kv[:{limits.context_tokens}])"
        )


def _minus(
    now: dict[tuple[int, int], int], before: dict[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    return {
        pair: count - before.get(pair, 0)
        for pair, count in now.items()
        if count > before.get(pair, 0)
    }
