"""The research API: prefill, hold the KV cache as a value, inspect it, push it to another layout
and decode there.

    kv = engine.prefill("Once upon a time", layout=PrefillLayout(tp=4))
    session = engine.create_session("a", layout=DecoderLayout(dp=2))
    session.push(kv)                       # over the channel, by the reshard plan
    engine.generate_tokens(session, max_new_tokens=32)
    session.append(" And then?")           # the next turn: only new tokens are computed
    kv = engine.pull("a")                  # the whole sequence, on the decode mesh
    engine.score(" The end.", after=kv)    # log-probabilities of a continuation
    engine.save(kv, "story.kv")            # and `engine.load` under another layout

`engine/research/kv_cache.py` cuts, joins and changes caches.

Everything runs on the caller's thread and returns when it is done. Prompts can be computed
together; decoding many sequences at once is for the embedded cluster. Executors, programs, pages
and the channel are those of serving. The caller's `LoadModel` puts weights onto a mesh.

Prefill layouts take the engine's devices from the front and session layouts from the back, so that
they overlap only where devices are too few; `devices=` chooses others. A device of two meshes holds
weights and pages of both, and bytes that it already holds are not transferred. Each (layout,
devices) is built once, with its own weights and pages, and kept until `engine.close()`.

Invariant: the tokens of a cache or a session are those whose KV it holds. `next_token` is chosen,
and its KV is not written yet."""

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
    """A layout for prefill, which gains from large matrices. `PrefillLayout(tp=4, ep=4)` splits
    heads over four devices and spreads experts over the same four."""
    return Layout(dp=dp, tp=tp, ep=ep)


def DecoderLayout(dp: int = 1, ep: int = 1, tp: int | None = None) -> Layout:
    """A layout for decode, which gains from many sequences. `DecoderLayout(dp=4, ep=16)` has four
    groups of four devices and spreads experts over all sixteen. `tp` defaults to ep / dp, and to 1
    for ep = 1."""
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
    """One model under any number of layouts; a context manager.

    Args:
        load: Loads the model's weights onto a mesh.
        tokenizer: Tokenizer for text prompts. Without it prompts are token ids.
        devices: Devices to use; by default all of JAX's.
        sizes: Pages, chunks and context of each mesh.
        fingerprint: The model's fingerprint (`jdisagg.engine.fingerprint`), which files of caches
            need.
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
        instance = self._prefill_instance(layout, devices)
        return self._prefill([self._prompt(prompt, instance)], instance, sampling)[0]

    def prefill_batch(
        self,
        prompts: Sequence[Prompt],
        layout: Layout = ONE_DEVICE,
        *,
        devices: Sequence[Device] | None = None,
    ) -> list[KVCache]:
        """Computes several prompts, as many in one chunk as fit, on all dp ranks of the mesh. The
        next tokens are chosen greedily.

        Args:
            prompts: texts, or token ids.
            layout: of the mesh; `dp` of it computes as many chunks at once.
            devices: as `prefill`.

        Returns:
            Their caches, in the same order, each on the rank that computed it; `seconds` is that of
            all together.

        Raises:
            InvalidRequestError: one of them, named by its index, is empty, too long or no prompt.
            LayoutError: as `prefill`.
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

    def score(
        self,
        tokens: Prompt,
        after: KVCache | Session | None = None,
        *,
        layout: Layout = ONE_DEVICE,
        devices: Sequence[Device] | None = None,
        top: int = 0,
        logits: bool = False,
    ) -> Scores:
        """What the model holds of given tokens, each after all those before it (teacher forcing).

        Args:
            tokens: text, or token ids.
            after: what they follow, scored where it lies; it stays as it is. Its last token is run
                anew, in a copy, for what predicts the first of `tokens`. None: nothing; all of
                `tokens` but the first are scored.
            layout, devices: of the mesh that computes a prompt, as `prefill`; not with `after`.
            top: how many of the most likely tokens to give at each place, 0 to 20.
            logits: give all logits, too: float32 [T, V] on the host.

        Returns:
            Log-probabilities, ranks, the likeliest tokens and logits of T tokens.

        Raises:
            InvalidRequestError: `tokens` is empty, of one token with nothing before it, too long or
                no prompt; `top` is out of range; the session holds nothing.
            BrokenModelError: logits are not finite.
            LayoutError: as `prefill`.
        """
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise InvalidRequestError(f"top must be in [0, {MAX_TOP_LOGPROBS}], got {top}")
        if after is not None and (layout != ONE_DEVICE or devices is not None):
            raise InvalidRequestError(
                f"layout={layout} and devices are of a prompt; what follows a cache is scored where"
                " that lies: push it there first"
            )
        if after is not None:
            kv = after.pull() if isinstance(after, Session) else after
            with self._beside(kv) as session:
                return session.score(tokens, top, logits)
        instance = self._prefill_instance(layout, devices)
        prompt = self._prompt(tokens, instance, "tokens")
        if len(prompt) < 2:
            raise InvalidRequestError(
                "tokens has one token, and nothing before it that predicts it; give two or more, or"
                " what it follows (after=)"
            )
        return instance.score_prompt(prompt, top, logits=logits)

    def save(self, kv: KVCache, path: str | os.PathLike[str]) -> None:
        """Writes a cache into a file (safetensors), whole: it can be loaded under any layout.

        Args:
            kv: any, a part included.
            path: of the file; one that is there is replaced.

        Raises:
            ConfigError: the engine was not told the model's fingerprint.
            KVFileError: the file cannot be written.
        """
        write_kv(kv, path, self._known_fingerprint())

    def load(
        self,
        path: str | os.PathLike[str],
        layout: Layout = ONE_DEVICE,
        *,
        devices: Sequence[Device] | None = None,
    ) -> KVCache:
        """Reads a cache that `save` wrote, of the same model in the same types.

        Args:
            path: of the file.
            layout: of the mesh onto which it comes.
            devices: as `prefill`.

        Returns:
            The cache that was saved, next token included, on dp rank 0 of that mesh.

        Raises:
            KVFileError: the file is missing, truncated, spoiled or of another model.
            ConfigError: the engine was not told the model's fingerprint.
            LayoutError: as `prefill`.
        """
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
        """Decodes where the source lies. A session goes on from there and keeps the new KV; a cache
        is left as it is. If the source's next token was chosen under other sampling parameters, or
        was not (behind a cache that was cut, joined or changed), the last token is run once more to
        choose anew, and its KV is written anew.

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

    def _known_fingerprint(self) -> str:
        if not self.fingerprint:
            raise ConfigError(
                "fingerprint: the engine was not told which model it has, so that a file could be"
                " of another; build it with fingerprint=model_fingerprint(directory, dtype)"
            )
        return self.fingerprint

    def _prefill_instance(
        self, layout: Layout, devices: Sequence[Device] | None
    ) -> ResearchInstance:
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
        """A session without a name that holds a copy of a cache, where that lies."""
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
