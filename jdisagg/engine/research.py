"""The research face: prefill here, hold the KV cache in the hand, look at it, push it to another
layout, decode there.

    kv = engine.prefill("Once upon a time", layout=PrefillLayout(tp=4))
    session = engine.create_session("a", layout=DecoderLayout(dp=2))
    session.push(kv)                       # over the channel, by the reshard plan
    engine.generate_tokens(session, max_new_tokens=32)
    kv = engine.pull("a")                  # on the decode mesh, generated tokens included

Everything runs on the caller's thread and returns when it is done; many sequences at once are the
embedded cluster's affair. Executors, programs, pages and the channel are those that serve. How
weights get onto a mesh is the caller's (`LoadModel`).

Where meshes lie: prefill layouts take the engine's devices from the front, session layouts from the
back, so that the two are disjoint while the devices suffice and OVERLAP where they do not;
`devices=` chooses others. Overlapping meshes are allowed: a device then holds weights and pages of
both, and bytes that it holds already do not move. Each (layout, devices) is built once, with its
own weights and pages, and kept until `engine.close()`.

Invariant: the tokens of a cache or a session are those whose KV it holds; `next_token` is chosen,
and its KV is not there yet."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from jdisagg.engine.instance import LoadModel
from jdisagg.engine.kv_cache import KVCache
from jdisagg.engine.layouts import DecoderLayout, PrefillLayout
from jdisagg.engine.research_instance import ResearchInstance
from jdisagg.engine.research_meshes import MeshSizes, ResearchMeshes
from jdisagg.engine.session import Generation, Move, Session, TextCodec, choice_of
from jdisagg.errors import ConfigError, InvalidRequestError
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import SampleSpec
from jdisagg.model_api import Device
from jdisagg.request import MAX_TOP_LOGPROBS, SamplingParams, foreign_token

__all__ = [
    "DecoderLayout",
    "Engine",
    "Generation",
    "KVCache",
    "Layout",
    "Move",
    "PrefillLayout",
    "Session",
]

ONE_DEVICE = Layout()
DEFAULT_NEW_TOKENS = 64


class Engine:
    """One model under as many layouts as are asked for; a context manager.

    Args:
        load: puts the model's weights onto a mesh.
        tokenizer: needed for text alone; without it prompts are token ids.
        devices: those to use; all of JAX's by default.
        page_size: tokens of KV in a page.
        chunk_tokens: the longest piece of a prompt that is computed at once.
        sessions_per_rank: for how many sequences of full context each dp rank has pages.
        context_tokens: caps the model's own.

    Raises:
        ConfigError: `sessions_per_rank` is below 1.
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
        self.tokenizer = tokenizer
        self.sessions: dict[str, Session] = {}
        sizes = MeshSizes(page_size, chunk_tokens, sessions_per_rank, context_tokens)
        self._meshes = ResearchMeshes(
            load, tuple(jax.devices() if devices is None else devices), sizes
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._meshes.devices

    def __repr__(self) -> str:
        layouts = ", ".join(str(instance.layout) for instance in self.instances)
        sessions = ", ".join(map(repr, self.sessions))
        return (
            f"Engine({len(self.devices)} devices, meshes: {layouts or 'none'},"
            f" sessions: {sessions or 'none'})"
        )

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
        """Computes the KV of a prompt and chooses the next token, with log-probabilities.

        Args:
            prompt: text, or token ids.
            layout: of the mesh that computes it.
            temperature: 0 chooses the likeliest token; otherwise at most 100.
            top_k: choose among so many of the likeliest; 0: all.
            top_p: choose among the likeliest that make up this share, in (0, 1]; 1: all.
            seed: of the random choice.
            devices: those of the mesh; the engine's first by default.

        Returns:
            The cache, on that mesh: keys and values [K, T, H] of each layer.

        Raises:
            InvalidRequestError: the prompt is empty, too long or no prompt; an option is out of
                range.
            LayoutError: the model or the devices do not suit the layout.
        """
        sampling = SamplingParams(1, temperature, top_k, top_p, seed=seed)
        tokens = self._tokens(prompt)
        instance = self._meshes.instance(
            layout, self.devices[: layout.devices] if devices is None else devices
        )
        context, vocabulary = instance.limits.context_tokens, instance.vocabulary
        if len(tokens) > context:
            raise InvalidRequestError(
                f"prompt has {len(tokens)} tokens; the context holds {context}; shorten the prompt"
            )
        if (at := foreign_token(tokens, vocabulary)) is not None:
            raise InvalidRequestError(
                f"prompt[{at}]={tokens[at]} is not a token id of the model; they are 0 to"
                f" {vocabulary - 1}"
            )
        wanted = min(MAX_TOP_LOGPROBS, vocabulary)
        choice = choice_of(sampling)
        kv = instance.prefill(tokens, SampleSpec(0, replace(choice, logprobs=wanted)))
        return replace(kv, next_token=replace(kv.next_token, sampling=choice))

    def create_session(
        self,
        session_id: str,
        layout: Layout = ONE_DEVICE,
        *,
        devices: Sequence[Device] | None = None,
    ) -> Session:
        """An empty session on the layout's mesh; `push` a cache into it.

        Args:
            session_id: its name; no other open session may have it.
            layout: of its mesh.
            devices: those of the mesh; the engine's last by default.

        Raises:
            InvalidRequestError: a session of that name is open.
            LayoutError: as `prefill`.
        """
        if session_id in self.sessions:
            raise InvalidRequestError(
                f"session {session_id!r} is open already; close it, or choose another id"
            )
        session = self.sessions[session_id] = Session(
            session_id, self._meshes, self.tokenizer, layout, devices, self._forget
        )
        return session

    def pull(self, session_id: str) -> KVCache:
        """The KV that a session holds, on its mesh. The session keeps its own.

        Raises:
            InvalidRequestError: no session of that name is open, or it holds no KV.
        """
        if session_id not in self.sessions:
            raise InvalidRequestError(
                f"session {session_id!r} is not open; open ones:"
                f" {', '.join(self.sessions) or 'none'}"
            )
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
        """Decodes where the source lies. A session goes on from there and keeps the new KV; a cache
        is left as it is. If the source's next token was chosen under other sampling parameters, the
        last token is run once more to choose anew.

        Args:
            source: what to go on from.
            max_new_tokens: at most so many; None: 64, or what room the context has left.
            temperature, top_k, top_p, seed: as `prefill`.
            logprobs: how many log-probabilities of `next_token` to give, 0 to 20.
            ignore_eos: go on where the model ends its text.
            on_token: called with each token as it is accepted.

        Returns:
            The new tokens and their text.

        Raises:
            InvalidRequestError: there is no room for so many tokens, or an option is out of range.
        """
        if not isinstance(source, Session):
            devices = list(source.mesh.devices.flat)
            with Session("", self._meshes, self.tokenizer, source.layout, devices) as session:
                session.push(source)
                return self.generate_tokens(
                    session,
                    max_new_tokens,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    seed=seed,
                    logprobs=logprobs,
                    ignore_eos=ignore_eos,
                    on_token=on_token,
                )
        new = _within(source, max_new_tokens)
        sampling = SamplingParams(
            new, temperature, top_k, top_p, seed=seed, logprobs=logprobs, ignore_eos=ignore_eos
        )
        return source.generate(sampling, on_token)

    @property
    def instances(self) -> list[ResearchInstance]:
        """The meshes that have been built so far."""
        return self._meshes.instances

    def close(self) -> None:
        """Ends all sessions and frees all meshes. Caches in the hand stay valid. Idempotent."""
        for session in list(self.sessions.values()):
            session.close()
        self._meshes.close()

    def _forget(self, session: Session) -> None:
        if self.sessions.get(session.session_id) is session:
            del self.sessions[session.session_id]

    def _tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError(
                    "prompt is text and the engine has no tokenizer; give token ids, or build the"
                    " engine with a tokenizer"
                )
            # A tokenizer may put a token before the text: without text that would be a prompt that
            # nobody wrote.
            prompt = self.tokenizer.encode(prompt) if prompt else ()
        for index, token in enumerate(prompt):
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise InvalidRequestError(
                    f"prompt[{index}]={token!r} is not a token id; give text, or a sequence of"
                    " integers"
                )
        if len(prompt) == 0:
            raise InvalidRequestError(
                "prompt is empty: at least one token is needed to predict the next; send some text"
            )
        return tuple(int(token) for token in prompt)


def _within(session: Session, asked: int | None) -> int:
    """How many new tokens are to come; no more than there is room for."""
    held, room = len(session.token_ids), session.room_tokens
    if room < 1:
        raise InvalidRequestError(
            f"session {session.session_id!r} holds {held} tokens, which is all of the context:"
            " there is no room for another; push a shorter cache, or open the engine with more"
            " context_tokens"
        )
    if asked is not None and asked > room:
        raise InvalidRequestError(
            f"max_new_tokens={asked} and the {held} tokens so far exceed the context of"
            f" {held + room}; ask for at most {room}, or leave max_new_tokens unset"
        )
    return min(DEFAULT_NEW_TOKENS, room) if asked is None else asked
