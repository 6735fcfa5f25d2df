"""Names of cached blocks.

A block's name is a keyed 32-byte hash of its tokens and the preceding block's name. So a name
identifies the block, its images, and all tokens before it, and blocks of two namespaces never have
the same name. With a shorter hash, or without a key, a client could construct collisions."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from jdisagg.config import PrefixConfig
from jdisagg.messages.kept_blocks import named_model
from jdisagg.prompt.images import block_content
from jdisagg.request import Request

NAME_BYTES = 32

Chain = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Computes the names (hashes) of cached blocks, which are equal on all workers of a cluster.

    Args:
        secret: Key of the hashes, up to 64 bytes. Names reveal nothing about prompts to anyone
            without the key.
        model: Model fingerprint and KV dtype. Workers can share KV only if both are equal.
        grid_tokens: Prompts are split between chunks, and prefill starts after cached blocks, only
            at multiples of this number of tokens; None means the block size. If it equals the
            largest chunk, a cache hit runs the same programs on the same rows as a miss, so results
            are bit-identical. If it is set, KV of decode steps is not cached, because decode steps
            round differently from prefill.
    """

    secret: bytes
    model: str
    grain_tokens: int = 128
    grid_tokens: int | None = None
    weights: str = ""

    @classmethod
    def of(cls, config: PrefixConfig, secret: bytes, model: str) -> "BlockNames | None":
        if not config.reuse:
            return None
        return cls(secret, model, config.grain_tokens, config.grid_tokens)

    @property
    def cut_tokens(self) -> int:
        return self.grid_tokens or self.grain_tokens

    def chain(
        self, request: Request, tokens: Sequence[int], block_tokens: int, known: Chain = ()
    ) -> Chain:
        known = known[: len(tokens) // block_tokens]
        content = np.asarray(tokens[len(known) * block_tokens :], "<u4").tobytes()
        step, every = 4 * self.grain_tokens, block_tokens // self.grain_tokens
        link, names = known[-1] if known else self._root(request), []
        first = len(known) * block_tokens
        for end in range(step, len(content) + 1, step):
            part = content[end - step : end]
            if request.images:
                stop = first + end // 4
                part += block_content(request.images, stop - self.grain_tokens, stop)
            link = blake2b(part, key=link, digest_size=NAME_BYTES).digest()
            names.append(link)
        return (*known, *names[every - 1 :: every])

    def stem(self, request: Request, chain: Chain, start: int) -> bytes:
        """Returns a hash of the blocks of `chain`, which end at position `start`, and of the
        prompt's tokens and images after it."""
        prompt = request.prompt_token_ids
        content = np.asarray(prompt[start:], "<u4").tobytes()
        if request.images:
            content += block_content(request.images, start, max(start, len(prompt)))
        link = chain[-1] if chain else self._root(request)
        stem = blake2b(content, key=link, digest_size=NAME_BYTES, person=b"jdisagg stem")
        return stem.digest()

    def digest(self, purpose: bytes, *parts: str) -> bytes:
        """Returns a hash of the model and of `parts`, keyed with the secret. Different values of
        `purpose` (up to 16 bytes) give unrelated hashes. Each part is hashed together with its
        length, so different lists of parts never have the same input."""
        root = blake2b(key=self.secret, digest_size=NAME_BYTES, person=purpose)
        model = named_model(self.model, self.weights)
        for part in (model, str(self.grain_tokens), *parts):
            text = part.encode("utf-8", "surrogatepass")
            root.update(len(text).to_bytes(8, "little") + text)
        return root.digest()

    def _root(self, request: Request) -> bytes:
        adapter = () if request.adapter is None else (request.adapter.digest,)
        return self.digest(b"jdisagg kv", request.tenant, request.cache_scope, *adapter)
