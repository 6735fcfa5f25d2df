"""Converts the prompts of clients (text, token ids, chats with images) to tokens and images.

This module makes all checks of prompts that need the model: size, context length, token ids, chat
roles, images.

Invariants: a prompt over the byte limit is refused before it is tokenized. Long text is tokenized
in a thread, and images are read in other threads, so that they delay no stream. Images are decoded
only after the check that their prompt fits into the context."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jdisagg.chat.call_ids import with_ids
from jdisagg.chat.formats import AnswerFormat
from jdisagg.chat.image_files import ImageFile, check_bytes
from jdisagg.chat.image_marks import HiddenMarks
from jdisagg.chat.messages import (
    ChatPrompt,
    check_chat,
    images_of,
    json_bytes,
    shown_messages,
    texts_of,
)
from jdisagg.config import LimitsConfig, Mode
from jdisagg.dispatch.client_limits import LongTexts
from jdisagg.dispatch.image_reader import (
    MAX_PIXEL_BYTES,
    ChatImageProcessor,
    ImageReader,
    PlacedImage,
)
from jdisagg.dispatch.options import utf8_bytes
from jdisagg.errors import InvalidRequestError
from jdisagg.layout.axes import Layout
from jdisagg.prompt.embedding import EmbeddingForm
from jdisagg.request import SamplingDefaults, foreign_token

THREAD_ABOVE_BYTES = 8 << 10
MESSAGE_BYTES = 64  # estimate of what a chat template adds to each message
LARGEST_TEXTS = 4
PROBE_CHARACTERS = 16 << 10
PROBE_CHARACTERS_PER_TOKEN = 32


class ChatTokenizer(Protocol):
    """The model's tokenizer. `encode` adds the BOS token, or omits it if `add_special_tokens` is
    False. `token_bytes` returns the bytes that a token adds to a text. `special_ids` are the tokens
    that `decode` omits. `images` is None if the model reads no images, and `embedding` is None if
    it makes no embeddings."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def sampling_defaults(self) -> SamplingDefaults: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def special_ids(self) -> Collection[int]: ...
    @property
    def images(self) -> ChatImageProcessor | None: ...
    @property
    def embedding(self) -> EmbeddingForm | None: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        """Raises InvalidRequestError if the model has no chat template or the template refuses the
        messages."""
        ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model. `prefill_layout` is None if one mesh does both prefill and decode.
    `sampling` has the model's default sampling options, which are used for options that a request
    leaves unset."""

    name: str
    family: str
    vocabulary: int
    context_tokens: int
    dtype: str
    mode: Mode
    prefill_layout: Layout | None
    decode_layout: Layout
    kv_bytes_per_token: int
    version: str = ""
    sampling: SamplingDefaults = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


class BareText(str):
    """A text to whose tokens no BOS token is added."""


Prompt = str | TokenPrompt | ChatPrompt


class Encoded(NamedTuple):
    token_ids: tuple[int, ...]
    placed: tuple[PlacedImage, ...] = ()


class PromptEncoder:
    """Checks prompts and converts them to tokens and images."""

    def __init__(
        self, codec: ChatTokenizer, model: ModelInfo, limits: LimitsConfig, answers: AnswerFormat
    ) -> None:
        self.codec, self.model = codec, model
        self._limits, self._answers = limits, answers
        # At least 1 MiB for each text, because a chat template adds text to many short messages.
        self._long_texts = LongTexts(LARGEST_TEXTS * max(limits.max_prompt_bytes, 1 << 20))
        self.images = ImageReader(lambda: codec.images, limits)

    def check(self, prompt: Prompt) -> int:
        if isinstance(prompt, TokenPrompt):
            if not prompt.token_ids:
                raise InvalidRequestError(
                    "prompt token_ids is empty: at least one token is needed; send some"
                )
            return 0
        if isinstance(prompt, ChatPrompt):
            return self._check_chat(prompt)
        return self._check_text("prompt", prompt)

    async def encode(self, prompt: Prompt, size_bytes: int, *, within_context: bool) -> Encoded:
        """Returns the tokens of a prompt that was checked.

        Raises:
            InvalidRequestError: The message names the field, the value and the limit.
        """
        if isinstance(prompt, TokenPrompt):
            if within_context:
                # Checks the length first, so that the ids of a list that is too long are not
                # checked.
                self.room(len(prompt.token_ids), None)
            self.check_ids("prompt token_ids", prompt.token_ids)
            encoded = Encoded(tuple(prompt.token_ids))
        elif isinstance(prompt, ChatPrompt) and images_of(prompt):
            encoded = await self.images.run(self._encode, prompt, within_context)
        elif size_bytes > THREAD_ABOVE_BYTES:
            encoded = await self._long_texts.run(size_bytes, self._encode, prompt, within_context)
        else:
            encoded = self._encode(prompt, within_context)
        if not encoded.token_ids and within_context:  # an empty text may still have a BOS token
            raise InvalidRequestError(
                "prompt is empty: at least one token is needed to predict the next; send some text"
            )
        self._check_known(encoded.token_ids)
        if within_context and not isinstance(prompt, ChatPrompt):
            self._check_imageless(encoded.token_ids)
        return encoded

    def _encode(self, prompt: str | ChatPrompt, within_context: bool) -> Encoded:
        if isinstance(prompt, ChatPrompt):
            return self._encode_chat(prompt, within_context)
        if within_context:
            self._check_beginning(prompt)
        bare = isinstance(prompt, BareText)
        return Encoded(tuple(self.codec.encode(prompt, add_special_tokens=not bare)))

    def _encode_chat(self, prompt: ChatPrompt, within_context: bool) -> Encoded:
        processor = self.codec.images
        files = [ImageFile(where, image, self._limits) for where, image in images_of(prompt)]
        messages = shown_messages(with_ids(prompt.messages, self._answers.tools))
        arguments = prompt.arguments
        tools = [tool.shown for tool in prompt.tools] if prompt.callable_tools else []
        hidden = None if processor is None else HiddenMarks(processor.marks)
        if hidden is not None:
            try:
                messages, arguments = hidden.hide(messages), hidden.hide(arguments)
                tools = hidden.hide(tools)
            except RecursionError:
                raise InvalidRequestError(
                    "messages, template arguments or tools are nested too deeply; flatten them"
                ) from None
        text = self.codec.apply_chat_template(
            messages,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            arguments=arguments,
            tools=tools,
        )
        if within_context:
            self._check_beginning(text)
        token_ids: list[int] = []
        for piece in [text] if hidden is None else hidden.pieces(text):
            # The chat template already contains BOS.
            token_ids += self.codec.encode(piece, add_special_tokens=False)
        if processor is None:
            return Encoded(tuple(token_ids))
        encoded = _expanded(token_ids, files, processor)
        pixels = sum(3 * layout.height * layout.width for _, layout, _ in encoded.placed)
        if within_context and pixels > MAX_PIXEL_BYTES:
            raise InvalidRequestError(
                f"messages have images of {pixels} bytes of pixels after their resize; at most"
                f" {MAX_PIXEL_BYTES} are taken in a request; leave some out"
            )
        return encoded

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        # Every token takes at least a byte on the wire, so the same limit bounds the work.
        if len(token_ids) > self._limits.max_prompt_bytes:
            raise InvalidRequestError(
                f"token_ids may hold at most {self._limits.max_prompt_bytes} ids, got"
                f" {len(token_ids)}"
            )
        if len(token_ids) > THREAD_ABOVE_BYTES:
            return await self._long_texts.run(
                len(token_ids), self._decode, token_ids, skip_special_tokens
            )
        return self._decode(token_ids, skip_special_tokens)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.check_ids("token_ids", token_ids)
        return self.codec.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _check_beginning(self, text: str) -> None:
        """Near the cut, the tokens can differ from the tokens of the whole text. The check
        therefore allows twice the context."""
        context = self.model.context_tokens
        probe_characters = PROBE_CHARACTERS + PROBE_CHARACTERS_PER_TOKEN * context
        if len(text) <= 2 * probe_characters:
            return
        probe_tokens = len(self.codec.encode(text[:probe_characters], add_special_tokens=False))
        if probe_tokens > 2 * context:
            raise InvalidRequestError(
                f"prompt has more than {2 * context} tokens in its first {probe_characters}"
                f" characters alone; the model's context holds {context}; shorten the prompt"
            )

    def _check_known(self, token_ids: Sequence[int]) -> None:
        vocabulary, largest = self.model.vocabulary, max(token_ids, default=0)
        if largest >= vocabulary:
            text = self.codec.decode([largest], skip_special_tokens=False)
            raise InvalidRequestError(
                f"prompt holds {text!r:.80}, token {largest} of the tokenizer, which the model does"
                f" not have: its ids are 0 to {vocabulary - 1}; leave it out"
            )

    def room(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Raises InvalidRequestError if the prompt and `max_tokens` do not fit."""
        context = self.model.context_tokens
        if prompt_tokens + 1 > context:
            raise InvalidRequestError(
                f"prompt has {prompt_tokens} tokens; the model's context of {context} holds at most"
                f" {context - 1} and one new token; shorten the prompt"
            )
        if max_tokens is not None and prompt_tokens + max_tokens > context:
            raise InvalidRequestError(
                f"max_tokens={max_tokens} and the prompt's {prompt_tokens} tokens exceed the"
                f" model's context of {context}; ask for at most {context - prompt_tokens}, or"
                " leave max_tokens unset"
            )
        return context - prompt_tokens

    def _check_chat(self, prompt: ChatPrompt) -> int:
        check_chat(prompt)
        self._check_tools(prompt)
        size_bytes = sum(self._check_text(name, text) for name, text in texts_of(prompt))
        size_bytes += json_bytes("chat_template_kwargs", prompt.arguments)
        size_bytes += sum(
            json_bytes(f"tools[{index}].function.parameters", tool.parameters)
            for index, tool in enumerate(prompt.tools)
        )
        self._check_size("messages", size_bytes)
        self._check_images(prompt)
        return size_bytes + MESSAGE_BYTES * len(prompt.messages)

    def _check_images(self, prompt: ChatPrompt) -> None:
        images, limit = images_of(prompt), self._limits.max_images
        if images and self.codec.images is None:
            raise InvalidRequestError(
                f"{images[0][0]} is an image, and the model {self.model.name!r} reads text only;"
                " leave it out, or use a model with a vision encoder"
            )
        if len(images) > limit:
            raise InvalidRequestError(
                f"messages have {len(images)} images; at most {limit} are taken (limits.max_images)"
            )
        for where, image in images:
            check_bytes(where, image, self._limits)

    def _check_imageless(self, token_ids: Sequence[int]) -> None:
        if self.codec.images is not None and self.codec.images.token in token_ids:
            raise InvalidRequestError(
                f"prompt has token {self.codec.images.token}, which stands for an image; send the"
                " image in a chat"
            )

    def _check_tools(self, prompt: ChatPrompt) -> None:
        if prompt.callable_tools and not self._answers.shows_tools:
            raise InvalidRequestError(
                f"tools cannot be used: the chat template of {self.model.name!r} shows none to the"
                " model; describe them in a message"
            )

    def _check_text(self, name: str, text: str) -> int:
        self._check_size(name, len(text) if isinstance(text, str) else 0)
        size_bytes = utf8_bytes(name, text)
        self._check_size(name, size_bytes)
        return size_bytes

    def _check_size(self, name: str, size_bytes: int) -> None:
        limit = self._limits.max_prompt_bytes
        if size_bytes > limit:
            raise InvalidRequestError(
                f"{name} has {size_bytes} bytes or more; at most {limit} are taken"
                " (limits.max_prompt_bytes)"
            )

    def check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        vocabulary = self.model.vocabulary
        if (at := foreign_token(token_ids, vocabulary)) is not None:
            raise InvalidRequestError(
                f"{name}[{at}]={token_ids[at]!r} is not a token id of the model; they are 0 to"
                f" {vocabulary - 1}"
            )


def _expanded(
    token_ids: Sequence[int], files: Sequence[ImageFile], processor: ChatImageProcessor
) -> Encoded:
    shown = token_ids.count(processor.token)
    if shown != len(files):
        raise InvalidRequestError(
            f"messages have {len(files)} images, but the model's chat template shows {shown} of"
            " them; send images in messages of the user"
        )
    made: list[int] = []
    placed: list[PlacedImage] = []
    begin = 0
    for file in files:
        end = token_ids.index(processor.token, begin)
        made += token_ids[begin:end]
        layout = processor.layout(file.where, file.height, file.width)
        placed.append(PlacedImage(len(made), layout, file))
        made += layout.token_ids
        begin = end + 1
    made += token_ids[begin:]
    return Encoded(tuple(made), tuple(placed))


def chat_of(prompt: Prompt) -> ChatPrompt | None:
    return prompt if isinstance(prompt, ChatPrompt) else None
