"""Tokenizer of a checkpoint: text to token ids and back, special tokens, end tokens, chat templates
and sampling defaults.

Wraps the `tokenizers` package. As in transformers, tokens that only tokenizer_config.json,
special_tokens_map.json or added_tokens.json name are added to those of tokenizer.json. Truncation
and padding of a tokenizer.json are disabled, because the server limits lengths. Long texts take
seconds and are encoded by the package's batch calls, which release the GIL."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jdisagg.errors import CheckpointError, InvalidRequestError
from jdisagg.prompt.embedding import EmbeddingForm
from jdisagg.request import MAX_EOS_IDS, SamplingDefaults
from models.chat_template import ChatTemplate
from models.generation_config import read_object, read_sampling_defaults, stated_eos_ids
from models.image_processor import ImageProcessor, read_image_processor
from models.model_folder import check_model_folder
from models.token_bytes import TokenBytes

_FEW_TOKENS = 1024
NO_WISHES = SamplingDefaults()
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Converts text to token ids and token ids to text, and renders chat templates.

    `eos_ids` are the tokens that end a text, with the main EOS token first. `special_ids` are
    tokens that `decode` can omit. `sampling_defaults` apply to fields that a request leaves
    unset."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int],
        special_tokens: Mapping[str, str | list[str]],
        chat_templates: Mapping[str, str],
        sampling_defaults: SamplingDefaults = NO_WISHES,
        images: ImageProcessor | None = None,
        embedding: EmbeddingForm | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat = ChatTemplate(chat_templates, special_tokens) if chat_templates else None
        # The template that renders tools, because it determines the parser of tool calls.
        self.chat_template = chat_templates.get("tool_use", chat_templates.get("default"))
        self.eos_ids = tuple(eos_ids)
        self.sampling_defaults = sampling_defaults
        self.images = images
        self.embedding = embedding
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        bos = special_tokens.get("bos_token")
        self.bos_id = backend.token_to_id(bos) if isinstance(bos, str) else None
        self.vocabulary = backend.get_vocab_size(with_added_tokens=True)
        self._bytes = TokenBytes(backend)

    @classmethod
    def from_directory(cls, directory: str | Path) -> "Tokenizer":
        directory = Path(directory)
        path = directory / "tokenizer.json"
        check_model_folder(directory)
        if not path.is_file():
            raise CheckpointError(
                f"model directory {str(directory)!r} has no tokenizer.json; download it, or convert"
                " the tokenizer to that format (transformers 5 with tiktoken does so with"
                " AutoTokenizer.from_pretrained and save_pretrained)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise CheckpointError(
                f"{path} is not a readable tokenizer ({error}); fetch it again"
            ) from error
        settings = read_object(directory / "tokenizer_config.json")
        special = _special_tokens(read_object(directory / "special_tokens_map.json") | settings)
        _add_tokens(backend, directory, settings, special)
        return cls(
            backend,
            eos_ids=_eos_ids(directory, backend, special),
            special_tokens=special,
            chat_templates=_find_templates(directory, settings),
            sampling_defaults=read_sampling_defaults(directory),
            images=read_image_processor(directory, backend.id_to_token, backend.token_to_id),
            embedding=EmbeddingForm.from_directory(directory),
        )

    @property
    def json(self) -> str:
        """The tokenizer in the format of tokenizer.json, with the tokens that were added."""
        return self._backend.to_str()

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            return list(
                self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
                    0
                ].ids
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(
                f"text is not valid Unicode ({error}); send UTF-8 text"
            ) from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of the token ids. Ids outside the vocabulary are ignored."""
        try:
            # Does not release the GIL: for the few tokens of each call, that would cost more time
            # than it saves.
            if len(ids) <= _FEW_TOKENS:
                return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
            return str(
                self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
            )
        except (OverflowError, TypeError) as error:
            raise InvalidRequestError(
                f"token ids must be in [0, {self.vocabulary - 1}] ({error}); correct them"
            ) from error

    def id_to_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        """Renders messages with the model's chat template to the prompt text, special tokens
        included. `continue_final_message`: whether the prompt ends inside the last message, after
        its content."""
        if self._chat is None:
            raise InvalidRequestError(
                "messages need a chat template and this model has none; send text or token ids"
                " instead"
            )
        return self._chat.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            arguments=arguments or {},
            tools=tools,
        )


def _special_tokens(fields: Mapping[str, object]) -> dict[str, str | list[str]]:
    def content(value: object) -> object:
        return value.get("content") if isinstance(value, dict) else value

    found: dict[str, str | list[str]] = {}
    for name in _SPECIAL_NAMES:
        if isinstance(text := content(fields.get(name)), str):
            found[name] = text
    more = fields.get("additional_special_tokens", fields.get("extra_special_tokens"))
    if isinstance(more, list):
        texts = [text for each in more if isinstance(text := content(each), str)]
        found["additional_special_tokens"] = texts
    return found


def _add_tokens(
    backend: tokenizers.Tokenizer,
    directory: Path,
    settings: Mapping[str, Any],
    special: Mapping[str, str | list[str]],
) -> None:
    """Without `added_tokens_decoder`, older checkpoints have added_tokens.json, which gives ids
    alone."""
    path = directory / "tokenizer_config.json"
    stated: Any = settings.get("added_tokens_decoder")
    named = [text for one in special.values() for text in ([one] if isinstance(one, str) else one)]
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    if stated is None:
        path = directory / "added_tokens.json"
        stated = {
            token_id: {"content": text, "special": text in named}
            for text, token_id in read_object(path).items()
            if text not in known
        }
    try:
        fields = [stated[token_id] for token_id in sorted(stated, key=int)]
        tokens = [
            AddedToken(each["content"], **{flag: each[flag] for flag in _FLAGS if flag in each})
            for each in fields
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: added tokens must be objects with content, by id ({error}); fetch it again"
        ) from error
    texts = {*known, *(token.content for token in tokens)}
    tokens += [AddedToken(text, special=True) for text in named if text not in texts]
    backend.add_tokens(
        [
            token
            for token in tokens
            if (old := known.get(token.content)) is None or token.special > old.special
        ]
    )


def _eos_ids(
    directory: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str | list[str]]
) -> tuple[int, ...]:
    """All three are needed: generation_config.json is often copied from the base model, and then
    only the tokenizer names the token that ends a chat turn."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        found += stated_eos_ids(directory / name)
    eos = special.get("eos_token")
    if isinstance(eos, str) and (eos_id := backend.token_to_id(eos)) is not None:
        found.append(eos_id)
    ids = tuple(dict.fromkeys(found))
    if len(ids) > MAX_EOS_IDS:
        raise CheckpointError(
            f"{directory}: eos_token_id may list {MAX_EOS_IDS} tokens, got {len(ids)} from"
            " generation_config.json, config.json and the tokenizer together; remove some"
        )
    return ids


def _find_templates(directory: Path, settings: Mapping[str, object]) -> dict[str, str]:
    found = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    path = directory / "chat_template.jinja"
    if path.is_file():
        found["default"] = path.read_text(encoding="utf-8")
    if found:
        return found
    for file, fields in (
        ("tokenizer_config.json", settings),
        ("chat_template.json", read_object(directory / "chat_template.json")),
    ):
        given = fields.get("chat_template")
        if isinstance(given, str):
            return {"default": given}
        if isinstance(given, list):
            given = {e.get("name"): e.get("template") for e in given if isinstance(e, dict)}
        if given is None:
            continue
        if not isinstance(given, dict) or not all(
            isinstance(name, str) and isinstance(text, str) for name, text in given.items()
        ):
            raise CheckpointError(
                f"{directory / file}: chat_template must be text, or texts by name, got"
                f" {type(fields['chat_template']).__name__}; correct it"
            )
        return {str(name): str(text) for name, text in given.items()}
    return {}
