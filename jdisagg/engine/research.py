"""The research face: prefill here, hold the KV cache in the hand, look at it, push it to another layout, decode there.

    kv = engine.prefill("Once upon a time", layout=PrefillLayout(tp=4))
    session = engine.create_session("a", layout=DecoderLayout(dp=2))
    session.push(kv)                       # over the channel, by the reshard plan
    engine.generate_tokens(session, max_new_tokens=32)
    kv = engine.pull("a")                  # on the decode mesh, generated tokens included

Everything runs on the caller's thread and returns when it is done; many sequences at once are the embedded cluster's affair.
Executors, programs, pages and the channel are those that serve. How weights get onto a mesh is the caller's (`LoadModel`).

Where meshes lie: prefill layouts take the engine's devices from the front, session layouts from the back, so that the two are
disjoint while the devices suffice and OVERLAP where they do not; `devices=` chooses others. Overlapping meshes are allowed:
a device then holds weights and pages of both, and bytes that it holds already do not move. Each (layout, devices) is built
once, with its own weights and pages, and kept until `engine.close()`.

Invariant: the tokens of a cache or a session are those whose KV it holds; `next_token` is chosen, and its KV is not there yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from jdisagg.clock import MonotonicClock
from jdisagg.config import InstanceConfig, Mode
from jdisagg.engine.instance import LoadModel
from jdisagg.engine.kv_cache import KVCache
from jdisagg.engine.layouts import DecoderLayout, PrefillLayout
from jdisagg.engine.limits import mesh_limits
from jdisagg.engine.research_instance import ResearchInstance
from jdisagg.engine.session import Generation, Move, Session, TextCodec, choice_of
from jdisagg.errors import ConfigError, InvalidRequestError, LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.request import MAX_TOP_LOGPROBS, SamplingParams, foreign_token
from jdisagg.scheduler.commands import SampleSpec
from jdisagg.transfer.in_process import InProcessChannel

__all__ = ["DecoderLayout", "Engine", "Generation", "KVCache", "Layout", "Move", "PrefillLayout", "Session"]

ONE_DEVICE = Layout()
DEFAULT_NEW_TOKENS = 64


class Engine:
    """One model under as many layouts as are asked for. `tokenizer` is needed for text alone.

    sessions_per_rank: for how many sequences of full context each dp rank has pages. context_tokens: caps the model's own.
    """

    def __init__(
        self,
        load: LoadModel,
        tokenizer: TextCodec | None = None,
        devices: Sequence[Device] | None = None,
        *,
        page_size: int = 16,
        chunk_tokens: int = 256,
        sessions_per_rank: int = 4,
        context_tokens: int | None = None,
    ) -> None:
        if sessions_per_rank < 1:
            raise ConfigError(f"sessions_per_rank must be at least 1, got {sessions_per_rank}")
        self.devices = tuple(jax.devices() if devices is None else devices)
        self.tokenizer = tokenizer
        self.channel = InProcessChannel(MonotonicClock())
        self.sessions: dict[str, Session] = {}
        self._load = load
        self._instances: dict[tuple[Layout, tuple[int, ...]], ResearchInstance] = {}
        self._page_size, self._chunk_tokens = page_size, chunk_tokens
        self._sessions_per_rank, self._context_tokens = sessions_per_rank, context_tokens

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prefill(
        self,
        prompt: str | Sequence[int],
        layout: Layout = ONE_DEVICE,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        devices: Sequence[Device] | None = None,
    ) -> KVCache:
        """Computes the KV of a prompt, text or token ids, on the layout's mesh, and chooses the next token (with log-probabilities)."""
        sampling = SamplingParams(1, temperature, top_k, top_p, seed=seed)
        tokens = self._tokens(prompt)
        instance = self.instance(layout, self.devices[: layout.devices] if devices is None else devices)
        context, vocabulary = instance.limits.context_tokens, instance.vocabulary
        if len(tokens) > context:
            raise InvalidRequestError(f"prompt has {len(tokens)} tokens; the context holds {context}; shorten the prompt")
        if (at := foreign_token(tokens, vocabulary)) is not None:
            raise InvalidRequestError(f"prompt[{at}]={tokens[at]} is not a token id of the model; they are 0 to {vocabulary - 1}")
        wanted = min(MAX_TOP_LOGPROBS, vocabulary)
        choice = choice_of(sampling)
        kv = instance.prefill(tokens, SampleSpec(0, replace(choice, logprobs=wanted)))
        return replace(kv, next_token=replace(kv.next_token, sampling=choice))

    def create_session(self, session_id: str, layout: Layout = ONE_DEVICE, *, devices: Sequence[Device] | None = None) -> Session:
        """An empty session on the layout's mesh; `push` a cache into it."""
        if session_id in self.sessions:
            raise InvalidRequestError(f"session {session_id!r} is open already; close it, or choose another id")
        session = self.sessions[session_id] = Session(self, session_id, layout, devices)
        return session

    def pull(self, session_id: str) -> KVCache:
        """The KV that a session holds, on its mesh. The session keeps its own."""
        if session_id not in self.sessions:
            raise InvalidRequestError(f"session {session_id!r} is not open; open ones: {', '.join(self.sessions) or 'none'}")
        return self.sessions[session_id].pull()

    def generate_tokens(
        self,
        source: KVCache | Session,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        logprobs: int | None = None,
        ignore_eos: bool = False,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Decodes where the source lies. A session goes on from there and keeps the new KV; a cache is left as it is.

        `max_new_tokens` None: 64, or what room the context has left. Raises InvalidRequestError for more than that.
        If the source's next token was chosen under other sampling parameters, the last token is run once more to choose anew.
        `logprobs` asks for those of `next_token`. `on_token` is called with each token as it is accepted.
        """
        if not isinstance(source, Session):
            with Session(self, "", source.layout, list(source.mesh.devices.flat)) as session:
                session.push(source)
                return self.generate_tokens(
                    session, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, logprobs=logprobs,
                    ignore_eos=ignore_eos, on_token=on_token,
                )  # fmt: skip
        new = _within(source, max_new_tokens)
        sampling = SamplingParams(new, temperature, top_k, top_p, seed=seed, logprobs=logprobs, ignore_eos=ignore_eos)
        return source.generate(sampling, on_token)

    def instance(self, layout: Layout, devices: Sequence[Device]) -> ResearchInstance:
        """The executor of a layout on these devices, built on first use."""
        if len(devices) != layout.devices:
            raise LayoutError(
                f"layout {layout} needs dp * tp = {layout.devices} devices, and there are {len(devices)} (the engine has "
                f"{len(self.devices)}); choose a smaller layout, or give as many devices"
            )
        key = (layout, tuple(device.id for device in devices))
        if key not in self._instances:
            loaded = self._load(layout, devices)
            model = loaded.model
            layout.check(model.geometry)
            context = min(self._context_tokens or model.context_tokens, model.context_tokens)
            # One layer a group, so that each block is one layer's.
            config = InstanceConfig(
                layout,
                self._page_size,
                pages_per_rank=self._sessions_per_rank * -(-context // self._page_size),
                slots_per_rank=1,
                chunk_tokens=self._chunk_tokens,
                min_chunk_tokens=min(64, self._chunk_tokens),
            )
            limits = mesh_limits(config, Mode.DISAGGREGATED, model.kv_spec, context, len(model.kv_spec.layers))
            self._instances[key] = ResearchInstance(f"research-{layout}", loaded, layout, limits, self.channel)
        return self._instances[key]

    @property
    def instances(self) -> list[ResearchInstance]:
        """What has been built so far."""
        return list(self._instances.values())

    def close(self) -> None:
        """Ends all sessions and frees all meshes. Caches in the hand stay valid. Idempotent."""
        for session in list(self.sessions.values()):
            session.close()
        for instance in self._instances.values():
            instance.close()
        self._instances.clear()

    def _tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("prompt is text and the engine has no tokenizer; give token ids, or build the engine with a tokenizer")
            # A tokenizer may put a token before the text: without text that would be a prompt that nobody wrote.
            prompt = self.tokenizer.encode(prompt) if prompt else ()
        for index, token in enumerate(prompt):
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise InvalidRequestError(f"prompt[{index}]={token!r} is not a token id; give text, or a sequence of integers")
        if len(prompt) == 0:
            raise InvalidRequestError("prompt is empty: at least one token is needed to predict the next; send some text")
        return tuple(int(token) for token in prompt)


def _within(session: Session, asked: int | None) -> int:
    """How many new tokens are to come; no more than there is room for."""
    held, room = len(session.token_ids), session.room_tokens
    if room < 1:
        raise InvalidRequestError(
            f"session {session.session_id!r} holds {held} tokens, which is all of the context: there is no room for another; "
            "push a shorter cache, or open the engine with more context_tokens"
        )
    if asked is not None and asked > room:
        raise InvalidRequestError(
            f"max_new_tokens={asked} and the {held} tokens so far exceed the context of {held + room}; ask for at most {room}, or leave "
            "max_new_tokens unset"
        )
    return min(DEFAULT_NEW_TOKENS, room) if asked is None else asked
