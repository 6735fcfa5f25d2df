"""Text to token ids and back, as a checkpoint's tokenizer.json says, with its special tokens, ends,
chat template and wishes for sampling.

The work is done by the `tokenizers` package. Truncation and padding that a tokenizer.json may carry
are switched off: length is the server's affair. Safe to share between threads, and those that do
not wait for it run on meanwhile: of the package's calls only the ones for batches let go of the
interpreter's lock, and a text of megabytes takes seconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from jdisagg.errors import CheckpointError, InvalidRequestError
from jdisagg.request import MAX_EOS_IDS, SamplingDefaults
from models.chat_template import ChatTemplate
from models.generation_config import read_object, read_sampling_defaults, stated_eos_ids
from models.model_folder import check_model_folder

_FEW_TOKENS = 1024
NO_WISHES = SamplingDefaults()
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
    """`eos_ids`: all ids that end a text, the first one the main. `special_ids`: ids that are no
    part of the text. `sampling_defaults`: what generation_config.json wants of a request that says
    nothing."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        sampling_defaults: SamplingDefaults = NO_WISHES,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat = None if chat_template is None else ChatTemplate(chat_template, special_tokens)
        self.chat_template = chat_template
        self.eos_ids = tuple(eos_ids)
        self.sampling_defaults = sampling_defaults
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_id = (
            None
            if "bos_token" not in special_tokens
            else backend.token_to_id(special_tokens["bos_token"])
        )
        self.vocabulary = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_directory(cls, directory: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, and what else of tokenizer_config.json, generation_config.json and
        config.json is there."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        check_model_folder(directory)
        if not path.is_file():
            raise CheckpointError(
                f"model directory {str(directory)!r} has no tokenizer.json; fetch it, or convert"
                " the tokenizer to that form"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise CheckpointError(
                f"{path} is not a readable tokenizer ({error}); fetch it again"
            ) from error
        settings = read_object(directory / "tokenizer_config.json")
        special = _special_tokens(read_object(directory / "special_tokens_map.json") | settings)
        return cls(
            backend,
            eos_ids=_eos_ids(directory, backend, special),
            special_tokens=special,
            chat_template=_find_template(directory, settings),
            sampling_defaults=read_sampling_defaults(directory),
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with BOS and the like where tokenizer.json adds them."""
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
        """Text of the ids; ids beyond the vocabulary have none."""
        try:
            # of every stream at every token: handing the lock over would cost more than it gives
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
        """The vocabulary's own spelling, None of an unknown id."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

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
        """The text that the model was taught to see for these messages; it holds its special tokens
        already. `continue_final_message`: it ends where the last message's words end. `arguments`:
        what the template may ask for beside the messages. `tools`: that the model may call."""
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

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation, ready for the model to answer."""
        return self.encode(
            self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt),
            add_special_tokens=False,
        )


def _special_tokens(fields: Mapping[str, object]) -> dict[str, str]:
    """Special tokens are given as strings, or as objects with their `content`."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = fields.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _eos_ids(
    directory: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]
) -> tuple[int, ...]:
    """All that generation_config.json, config.json (each an id or a list) and the tokenizer's EOS
    token name, in this order; perhaps none. One of them alone is often behind: a chat's end is told
    to the tokenizer, and generation_config.json is the base model's."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        found += stated_eos_ids(directory / name)
    if "eos_token" in special and (eos := backend.token_to_id(special["eos_token"])) is not None:
        found.append(eos)
    ids = tuple(dict.fromkeys(found))
    if len(ids) > MAX_EOS_IDS:
        raise CheckpointError(
            f"{directory}: eos_token_id may name {MAX_EOS_IDS} tokens, got {len(ids)} of"
            " generation_config.json, config.json and the tokenizer together; leave some out"
        )
    return ids


def _find_template(directory: Path, settings: Mapping[str, object]) -> str | None:
    """chat_template.jinja where there is one; else tokenizer_config.json's, a string or a list of
    named ones ('default' counts)."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):
        named = {
            entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)
        }
        given = named.get("default")
    if given is not None and not isinstance(given, str):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be text, got"
            f" {type(given).__name__}; correct it"
        )
    return given
