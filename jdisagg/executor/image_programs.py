"""Encodes the images of prompts on the prefilling mesh, and replaces the embeddings of image tokens
by the encoder's output.

The activations of an image stay on the device, so that later chunks and other prompts with this
image do not compute them again. Only commands change the store, so that all processes of an
instance make the same decisions."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.executor.programs import RANK, Programs
from jdisagg.executor.weights import Part, VisionParts, Weights
from jdisagg.messages.step_commands import PrefillRow, SleepMesh, StepCommand, WakeMesh
from jdisagg.model_api import Shards
from jdisagg.prompt.images import ImageFormat, PromptImage, rows_of_image
from jdisagg.scheduler.executor import buckets

LEAST_PATCHES = 256


def patch_buckets(form: ImageFormat) -> tuple[int, ...]:
    return buckets(min(LEAST_PATCHES, form.most_patches), form.most_patches)


class ImageStore:
    """Assigns the rows of one rank's array of activations to images, which are identified by
    digest."""

    def __init__(self, rows: int) -> None:
        self._free = list(range(rows))[::-1]
        self._held: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self.size = rows

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    def rows(self, digest: bytes) -> np.ndarray:
        """Returns the rows that hold an image, int32, in the order of the image's tokens."""
        return self._held[digest]

    def take(self, digest: bytes, rows: int, used: set[bytes]) -> bool:
        """Returns True if the image must be encoded, and False if it had rows already."""
        if digest in self._held:
            self._held.move_to_end(digest)
            return False
        while len(self._free) < rows:
            oldest = next(other for other in self._held if other not in used)
            self._free += self._held.pop(oldest).tolist()
        self._held[digest] = np.array([self._free.pop() for _ in range(rows)], np.int32)
        return True

    def clear(self) -> None:
        """Drops all images, because their activations belong to weights that have changed."""
        for rows in self._held.values():
            self._free += rows.tolist()
        self._held.clear()


class _Pass(NamedTuple):
    rows: list[list[tuple[PrefillRow, PromptImage]]]


class ImagePrograms:
    """Builds and runs the programs that encode and place images. Used by the dispatch thread
    only."""

    def __init__(
        self, programs: Programs, weights: Weights, shards: Shards, form: ImageFormat, kept: int
    ) -> None:
        assert weights.vision is not None, "the model has a vision encoder"
        self._programs, self._shards, self.form = programs, shards, form
        self._vision: VisionParts = weights.vision
        self._width, self._dtype = weights.width, weights.dtype
        self._ranks = programs.mesh.shape["dp"]
        self._kept, self.encoded, self.depth = kept, 0, len(self._vision.deep_after)
        self._stores = [ImageStore(kept) for _ in range(self._ranks)]
        self._array: Any = self._zeros()

    def _zeros(self) -> Any:
        shape = (self._ranks, self._kept, 1 + self.depth, self._width)
        return self._programs.zeros(shape, self._dtype, RANK)

    def change(self, command: StepCommand) -> None:
        """Drops all images before a command that changes the mesh's weights. Frees the store's
        device memory while the mesh sleeps."""
        for store in self._stores:
            store.clear()
        if isinstance(command, SleepMesh):
            self._array = None
        elif isinstance(command, WakeMesh) and self._array is None:
            self._array = self._zeros()

    def run(self, rows: Sequence[PrefillRow], x: jax.Array) -> tuple[jax.Array, Any]:
        """Replaces the embeddings of image tokens.

        Returns:
            The new embeddings.
            Activations to add after the first layers of the text model, [ranks, T, depth, D], or
                () if the model adds none.
        """
        deep = self.nothing_added(x.shape[1])
        for images in self._passes(rows):
            self._encode(images)
            x, deep = self._place(self._index(images, x.shape[1]), x, deep)
        return x, deep

    def nothing_added(self, width: int) -> Any:
        """Returns the second result of `run` for a chunk of `width` tokens without images: zeros,
        or () if the model adds no image activations."""
        if not self.depth:
            return ()
        shape, dtype = (1, width, self.depth, self._width), self._dtype
        build = lambda: self._programs.compile(lambda: jnp.zeros(shape, dtype), (), (), RANK)  # noqa: E731
        return self._programs.get(("nothing added", width), build)()

    def warm_encoder(self, patches: int) -> None:
        self._encode_batch([None] * self._ranks, patches, warming=True)

    def warm_place(self, width: int) -> None:
        shape = (self._ranks, width, self._width)
        x = self._programs.zeros(shape, self._dtype, RANK)
        index, deep = np.full(shape[:2], -1, np.int32), self.nothing_added(width)
        self._place(index, x, deep)[0].block_until_ready()

    # ---- which images

    def _passes(self, rows: Sequence[PrefillRow]) -> Iterator[_Pass]:
        queues: list[list[tuple[PrefillRow, PromptImage]]] = [[] for _ in range(self._ranks)]
        for row in rows:
            queues[row.rank] += [(row, image) for image in row.images]
        while any(queues):
            taken: list[list[tuple[PrefillRow, PromptImage]]] = []
            for rank, queue in enumerate(queues):
                count, tokens, seen = 0, 0, set[bytes]()
                for _, image in queue:
                    tokens += 0 if image.digest in seen else self.form.tokens(image)
                    if tokens > self._kept:
                        break
                    seen.add(image.digest)
                    count += 1
                assert count or not queue, "the worker refuses images that are too large"
                taken.append(queue[:count])
                queues[rank] = queue[count:]
            yield _Pass(taken)

    def _encode(self, images: _Pass) -> None:
        missing: list[list[PromptImage]] = []
        for store, of_rank in zip(self._stores, images.rows, strict=True):
            used = {image.digest for _, image in of_rank}
            missing.append(
                [
                    image
                    for _, image in of_rank
                    if store.take(image.digest, self.form.tokens(image), used)
                ]
            )
        for number in range(max(map(len, missing), default=0)):
            batch = [one[number] if number < len(one) else None for one in missing]
            most = max(image.patches for image in batch if image is not None)
            size = next(size for size in patch_buckets(self.form) if size >= most)
            self._encode_batch(batch, size)
            self.encoded += sum(image is not None for image in batch)

    def _index(self, images: _Pass, width: int) -> np.ndarray:
        index = np.full((self._ranks, width), -1, np.int32)
        for rank, (store, of_rank) in enumerate(zip(self._stores, images.rows, strict=True)):
            for row, image in of_rank:
                first = max(image.start, row.start)
                last = min(image.end, row.start + len(row.tokens))
                kept, own = store.rows(image.digest), rows_of_image(image, first, last, self.form)
                at = row.offset + first - row.start
                index[rank, at : at + last - first] = np.where(own < 0, -1, kept[own])
        return index

    # ---- programs

    def _encode_batch(
        self, batch: Sequence[PromptImage | None], patches: int, warming: bool = False
    ) -> None:
        form, ranks = self.form, self._ranks
        pixels = np.zeros((ranks, patches, 3 * form.patch**2), np.uint8)
        place = np.zeros((ranks, patches, 2), np.int32)
        size = np.ones((ranks, 3), np.int32)
        target = np.full((ranks, patches // form.merge**2), self._kept, np.int32)
        size[:, 2] = 0
        for rank, image in enumerate(batch):
            if image is not None:
                count = image.patches
                pixels[rank, :count], place[rank, :count] = patches_of(image, form)
                size[rank] = (*image.grid[1:], count)
                target[rank, : form.tokens(image)] = self._stores[rank].rows(image.digest)
        arrays = self._programs.put((pixels, place, size, target))
        pixels_on, place_on, size_on, target_on = arrays
        x = self._patches(patches, pixels_on, place_on, size_on)
        deep = dict(zip(self._vision.deep_after, self._vision.deep_mergers, strict=True))
        ran = set[object]()
        for number, block in enumerate(self._vision.blocks):
            if not warming or block.structure not in ran:
                ran.add(block.structure)
                x = self._block(block, x, place_on, size_on)
            if number in deep:
                column = 1 + self._vision.deep_after.index(number)
                self._array = self._merge(deep[number], column, x, target_on)
        self._array = self._merge(self._vision.merger, 0, x, target_on)

    def _patches(self, patches: int, *arrays: jax.Array) -> jax.Array:
        part, shards = self._vision.patches, self._shards

        def body(leaves: Any, pixels: Any, place: Any, size: Any) -> jax.Array:
            module: Any = part.merge(leaves)
            return module(pixels[0], place[0], size[0, :2], shards)[None]

        arguments = (part.leaves, *arrays)
        build = lambda: self._programs.compile(  # noqa: E731
            body, arguments, (part.specs, RANK, RANK, RANK), RANK
        )
        return self._programs.get(("image patches", patches), build)(*arguments)

    def _block(self, part: Any, x: jax.Array, place: jax.Array, size: jax.Array) -> jax.Array:
        shards = self._shards

        def body(leaves: Any, x: Any, place: Any, size: Any) -> jax.Array:
            return part.merge(leaves)(x[0], place[0], size[0, 2], shards)[None]

        arguments = (part.leaves, x, place, size)
        build = lambda: self._programs.compile(  # noqa: E731
            body, arguments, (part.specs, RANK, RANK, RANK), RANK, donate=(1,)
        )
        return self._programs.get(("image block", x.shape, part.structure), build)(*arguments)

    def _merge(self, part: Part, column: int, x: jax.Array, target: jax.Array) -> jax.Array:
        shards, dtype = self._shards, self._dtype

        def body(leaves: Any, store: Any, x: Any, target: Any) -> jax.Array:
            module: Any = part.merge(leaves)
            rows_TD = module(x[0], shards).astype(dtype)
            return store[0].at[target[0], column].set(rows_TD, mode="drop")[None]

        arguments = (part.leaves, self._array, x, target)
        build = lambda: self._programs.compile(  # noqa: E731
            body, arguments, (part.specs, RANK, RANK, RANK), RANK, donate=(1,)
        )
        return self._programs.get(("image rows", column, x.shape), build)(*arguments)

    def _place(self, index: np.ndarray, x: jax.Array, deep: Any) -> tuple[jax.Array, Any]:
        def body(store: Any, x: Any, deep: Any, index: Any) -> tuple[jax.Array, Any]:
            rows_TCD = jnp.take(store[0], index[0], axis=0, mode="clip")
            there_T = index[0] >= 0
            x_TD = jnp.where(there_T[:, None], rows_TCD[:, 0], x[0])
            if isinstance(deep, tuple):
                return x_TD[None], deep
            return x_TD[None], jnp.where(there_T[:, None, None], rows_TCD[:, 1:], deep[0])[None]

        spec = () if isinstance(deep, tuple) else RANK
        arguments = (self._array, x, deep, self._programs.put(index))
        build = lambda: self._programs.compile(  # noqa: E731
            body, arguments, (RANK, RANK, spec, RANK), (RANK, spec), donate=(1, 2)
        )
        return self._programs.get(("image tokens", x.shape), build)(*arguments)


def patches_of(image: PromptImage, form: ImageFormat) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pixels of each patch of an image, uint8 [P, patch * patch * 3], and the patch's
    row and column, int32 [P, 2]. Patches of the same token are adjacent."""
    _, height, width = image.grid
    merge, patch = form.merge, form.patch
    down, right = height // merge, width // merge
    pixels = np.frombuffer(image.pixels, np.uint8)
    pixels = pixels.reshape(down, merge, patch, right, merge, patch, 3)
    pixels = pixels.transpose(0, 3, 1, 4, 2, 5, 6).reshape(height * width, 3 * patch**2)
    place = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), axis=-1)
    place = place.reshape(down, merge, right, merge, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2)
    return pixels, place.astype(np.int32)
