"""Trains the tokenizer of the tiny models and writes its two files: byte-level BPE, so that any
UTF-8 text round-trips.

Ids 0 and 1 are `<s>` and `</s>`. The next ids are the tokens that delimit turns in the chat
template. The post-processor adds `<s>` at the start of a text. The chat template writes `<s>`
itself, so rendered conversations are encoded without added special tokens."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.tiny_models.corpus import END_OF_TEXT, END_OF_TURN, TURN

BEGIN = "<s>"
SPECIAL_TOKENS = (BEGIN, END_OF_TEXT, TURN["system"], TURN["user"], TURN["assistant"], END_OF_TURN)
BEGIN_ID = 0
END_IDS = (SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(END_OF_TURN))

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role'] + '; use system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Trains a tokenizer with exactly `vocabulary` ids. The same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, BEGIN_ID)]
    )
    size = tokenizer.get_vocab_size()
    if size != vocabulary:
        raise ValueError(
            f"the corpus gives {size} tokens, not {vocabulary}; use more text or a smaller"
            " vocabulary"
        )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context_tokens: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END_OF_TEXT,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
