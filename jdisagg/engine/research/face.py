"""The research API. Prefill a prompt on one layout, inspect its KV cache, push the cache to another
layout and decode there.

    kv = engine.prefill("Once upon a time", layout=PrefillLayout(tp=4))
    session = engine.create_session("a", layout=DecoderLayout(dp=2))
    session.push(kv)                       # over the channel, by the reshard plan
    engine.generate_tokens(session, max_new_tokens=32)
    session.append(" And then?")           # the next turn: only new tokens are computed
    kv = engine.pull("a")                  # the whole sequence, on the decode mesh
    engine.score(" The end.", after=kv)    # log-probabilities of a continuation
    engine.save(kv, "story.kv")            # and `engine.load` under another layout

All calls block the caller's thread until they are done. Several prompts can be computed together,
but only one sequence decodes at a time. To decode many sequences at once, use the embedded cluster.

By default, prefill meshes use the first of the engine's devices and session meshes the last, so
that they overlap only if there are too few devices. Each pair of layout and devices is built once,
with its own weights and pages, and exists until `engine.close()`.

Invariant: a cache or session holds the KV of exactly its `token_ids`. `next_token` is chosen, but
its KV is not computed yet."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from jdisagg.engine.replica import LoadModel
from jdisagg.engine.research.instance import ResearchInstance
from jdisagg.engine.research.kv_cache import KVCache
from jdisagg.engine.research.kv_file import read_kv, write_kv
from jdisagg.engine.research.meshes import MeshSizes, ResearchMeshes
from jdisagg.engine.research.prompt_tokens import Prompt, TextCodec, prompt_tokens
from jdisagg.engine.research.scores import Scores
from jdisagg.engine.research.session import GREEDY, Session, choice_of
from jdisagg.engine.research.session_results import Append, Generation, Move
from jdisagg.errors import ConfigError, InvalidRequestError, LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import SampleSpec
from jdisagg.model_api import Device
from jdisagg.request import MAX_TOP_LOGPROBS, SamplingParams

__all__ = [
    "Append",
    "DecoderLayout",
    "Engine",
    "Generation",
    "KVCache",
    "Layout",
    "MeshSizes",
    "Move",
    "PrefillLayout",
    "Scores",
    "Session",
]

ONE_DEVICE = Layout()
DEFAULT_SIZES = MeshSizes()
DEFAULT_NEW_TOKENS = 64


def PrefillLayout(tp: int = 1, ep: int = 1, dp: int = 1) -> Layout:
    """Returns a layout for prefill. For example, `PrefillLayout(tp=4, ep=4)` shards heads over four
    devices, and distributes experts over the same four devices."""
    return Layout(dp=dp, tp=tp, ep=ep)


def DecoderLayout(dp: int = 1, ep: int = 1, tp: int | None = None) -> Layout:
    """Returns a layout for decode. For example, `DecoderLayout(dp=4, ep=16)` has four groups of
    four devices, and distributes experts over all sixteen. `tp` defaults to ep / dp, or to 1 if ep
    is 1."""
    if tp is None:
        Layout(dp=dp)  # raises for dp that is no positive integer
        if not isinstance(ep, int) or ep < 1 or (ep > 1 and ep % dp):
            raise LayoutError(
                f"decoder layout: tp = ep / dp = {ep!r} / {dp} is not a positive integer; choose ep"
                " as a multiple of dp, or give tp"
            )
        tp = max(1, ep // dp)
    return Layout(dp=dp, tp=tp, ep=ep)


class Engine:
    """Runs one model under any number of layouts. An engine is a context manager.

    Args:
        tokenizer: Tokenizer for text prompts. Without a tokenizer, prompts must be token ids.
        fingerprint: Model fingerprint (`jdisagg.engine.fingerprint`) for `save` and `load`.
    """

    def __init__(
        self,
        load: LoadModel,
        tokenizer: TextCodec | None = None,
        devices: Sequence[Device] | None = None,
        *,
        sizes: MeshSizes = DEFAULT_SIZES,
        fingerprint: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.sessions: dict[str, Session] = {}
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
        prompt: Prompt,
        layout: Layout | str = ONE_DEVICE,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        devices: Sequence[Device] | None = None,
    ) -> KVCache:
        """Computes the KV of a prompt and chooses the next token, with log-probabilities.

        Args:
            prompt: Text or token ids.
            layout: Layout of the mesh, as an object or as text like "tp=2".
            temperature: 0 for the most likely token; otherwise at most 100.
            top_k: Number of most likely tokens to choose among; 0 for all.
            top_p: Probability mass of the most likely tokens to choose among, in (0, 1].
            devices: Devices of the mesh. By default the first of the engine's devices.

        Returns:
            The prompt's cache on the mesh: keys and values of each layer, [kv heads, tokens, head
                size].

        Raises:
            InvalidRequestError: The prompt is empty, too long, or neither a text nor token ids. Or
                an option is out of range.
            LayoutError: The model cannot be sharded by the layout, or there are too few devices.
        """
        sampling = SamplingParams(1, temperature, top_k, top_p, seed=seed)
        instance = self._prefill_instance(layout, devices)
        return self._prefill([self._prompt(prompt, instance)], instance, sampling)[0]

    def prefill_batch(
        self,
        prompts: Sequence[Prompt],
        layout: Layout | str = ONE_DEVICE,
        *,
        devices: Sequence[Device] | None = None,
    ) -> list[KVCache]:
        """Computes several prompts on all dp ranks of the mesh, packed into chunks. The next tokens
        are chosen greedily.

        Args:
            layout: Layout of the mesh. Its dp ranks compute one chunk each at the same time.

        Returns:
            The caches in the order of the prompts. Each cache is on the dp rank that computed it.
                Its `seconds` is the time for all prompts together.

        Raises:
            InvalidRequestError: A prompt is empty, too long or of a wrong type. The message has its
                index.
        """
        instance = self._prefill_instance(layout, devices)
        checked = [
            self._prompt(prompt, instance, f"prompts[{index}]")
            for index, prompt in enumerate(prompts)
        ]
        return self._prefill(checked, instance, GREEDY)

    def create_session(
        self,
        session_id: str,
        layout: Layout | str = ONE_DEVICE,
        *,
        devices: Sequence[Device] | None = None,
    ) -> Session:
        """Creates an empty session on the layout's mesh. Push a cache into the session to use it.

        Args:
            devices: Devices of the mesh. By default the last of the engine's devices.

        Raises:
            InvalidRequestError: Another open session has the name `session_id`.
        """
        if session_id in self.sessions:
            raise InvalidRequestError(
                f"session {session_id!r} is open already; close it, or choose another id"
            )
        session = self.sessions[session_id] = Session(
            session_id, self._meshes, self.tokenizer, Layout.of(layout), devices, self._forget
        )
        return session

    def pull(self, session_id: str) -> KVCache:
        """Copies the KV of a session to a new cache on the session's mesh. The session does not
        change.

        Raises:
            InvalidRequestError: No session named `session_id` is open, or the session holds no KV.
        """
        if session_id not in self.sessions:
            raise InvalidRequestError(
                f"session {session_id!r} is not open; open ones:"
                f" {', '.join(self.sessions) or 'none'}"
            )
        return self.sessions[session_id].pull()

    def score(
        self,
        tokens: Prompt,
        after: KVCache | Session | None = None,
        *,
        layout: Layout | str = ONE_DEVICE,
        devices: Sequence[Device] | None = None,
        top: int = 0,
        logits: bool = False,
    ) -> Scores:
        """Scores given tokens, each after all tokens before it (teacher forcing).

        Args:
            after: Cache or session that precedes the tokens, or None. Scoring runs on its mesh and
                does not change it. Its last token is recomputed in a copy, to predict the first of
                `tokens`. With None, the first of `tokens` is not scored.
            layout, devices: Mesh to score on, as for `prefill`. Not allowed with `after`.
            top: Number of most likely tokens to return at each position, 0 to 20.
            logits: Whether to return all logits on the host, float32 [scored tokens, vocabulary].

        Raises:
            InvalidRequestError: `tokens` is empty, a single token without `after`, too long or not
                a prompt; `top` is out of range; or the session holds no KV.
            BrokenModelError: Logits are not finite.
        """
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise InvalidRequestError(f"top must be in [0, {MAX_TOP_LOGPROBS}], got {top}")
        if after is not None and (Layout.of(layout) != ONE_DEVICE or devices is not None):
            raise InvalidRequestError(
                f"layout={layout} and devices are for prompts; tokens after a cache are scored on"
                " its mesh; push the cache there first"
            )
        if after is not None:
            kv = after.pull() if isinstance(after, Session) else after
            with self._beside(kv) as session:
                return session.score(tokens, top, logits)
        instance = self._prefill_instance(layout, devices)
        prompt = self._prompt(tokens, instance, "tokens")
        if len(prompt) < 2:
            raise InvalidRequestError(
                f"tokens must have at least 2 tokens, got {len(prompt)}, because the first one is"
                " not predicted; give more, or the cache before them (after=)"
            )
        return instance.score_prompt(prompt, top, logits=logits)

    def save(self, kv: KVCache, path: str | os.PathLike[str]) -> None:
        """Writes a cache to a safetensors file that can be loaded under any layout.

        Raises:
            ConfigError: The engine has no model fingerprint.
            KVFileError: The file cannot be written.
        """
        write_kv(kv, path, self._known_fingerprint())

    def load(
        self,
        path: str | os.PathLike[str],
        layout: Layout | str = ONE_DEVICE,
        *,
        devices: Sequence[Device] | None = None,
    ) -> KVCache:
        """Reads a cache from a file that `save` wrote. Model and dtypes must be the same.

        Returns:
            The saved cache with its next token, on dp rank 0 of the mesh.

        Raises:
            KVFileError: The file is missing, truncated, damaged or of another model.
            ConfigError: The engine has no model fingerprint.
        """
        layout = Layout.of(layout)
        place = self._prefill_instance(layout, devices).place()
        return read_kv(path, self._known_fingerprint(), layout, place)

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
        """Generates tokens after a session or cache, on its mesh. The new tokens and their KV are
        added to a session. A cache is not changed.

        `source.next_token` is the first new token if it was chosen with equal sampling parameters.
        Otherwise, or if there is none (after a slice, join or change of a cache), the last token is
        recomputed to choose the first new token.

        Args:
            max_new_tokens: Maximum number of new tokens. None for 64, or fewer if the context has
                less room.
            logprobs: Number of most likely tokens whose log-probabilities are returned with
                `next_token`, 0 to 20.
            on_token: Function that is called with each accepted token.

        Raises:
            InvalidRequestError: The context has too little room, or an option is out of range.
        """
        if not isinstance(source, Session):
            with self._beside(source) as session:
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
        return self._meshes.instances

    def close(self) -> None:
        """Closes all sessions and frees all meshes. Caches stay valid. Idempotent."""
        for session in list(self.sessions.values()):
            session.close()
        self._meshes.close()

    def _forget(self, session: Session) -> None:
        if self.sessions.get(session.session_id) is session:
            del self.sessions[session.session_id]

    def _known_fingerprint(self) -> str:
        if not self.fingerprint:
            raise ConfigError(
                "fingerprint: the engine has none, so that a file could be of another model;"
                " build the engine with fingerprint=model_fingerprint(directory, dtype)"
            )
        return self.fingerprint

    def _prefill_instance(
        self, layout: Layout | str, devices: Sequence[Device] | None
    ) -> ResearchInstance:
        layout = Layout.of(layout)
        chosen = self.devices[: layout.devices] if devices is None else devices
        return self._meshes.instance(layout, chosen)

    def _prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        instance: ResearchInstance,
        sampling: SamplingParams,
    ) -> list[KVCache]:
        choice = choice_of(sampling)
        asked = replace(choice, logprobs=instance.logprobs_wanted)
        caches = instance.prefill(prompts, SampleSpec(0, asked))
        return [replace(kv, chosen=replace(kv.next_token, sampling=choice)) for kv in caches]

    def _beside(self, kv: KVCache) -> Session:
        devices = list(kv.mesh.devices.flat)
        session = Session("", self._meshes, self.tokenizer, kv.layout, devices)
        session.push(kv)
        return session

    def _prompt(
        self, prompt: Prompt, instance: ResearchInstance, name: str = "prompt"
    ) -> tuple[int, ...]:
        tokens = prompt_tokens(prompt, self.tokenizer, instance.vocabulary, name=name)
        if len(tokens) > (context := instance.limits.context_tokens):
            raise InvalidRequestError(
                f"{name} has {len(tokens)} tokens; the context holds {context}; shorten the prompt"
            )
        return tokens


def _within(session: Session, asked: int | None) -> int:
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
