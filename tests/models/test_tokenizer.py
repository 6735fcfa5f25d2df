"""A tokenizer's folder: end tokens, special tokens, and chat templates as published checkpoints
have them."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jdisagg.errors import CheckpointError, InvalidRequestError
from jdisagg.request import SamplingDefaults
from models.chat_template import ChatTemplate
from models.generation_config import LEAST_TOP_P
from models.tokenizer import Tokenizer
from tests.lanes import first_quick

CHATML = (
    "{% for message in messages %}\n    {%- if message.role not in ['user', 'assistant', 'system']"
    " %}{{ raise_exception('unknown role') }}{% endif %}\n    {{- '<|im_start|>' + message['role']"
    " + '\\n' + message['content'] + '<|im_end|>\\n' }}\n{%- endfor %}\n{%- if"
    " add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["once upon a time"], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    _write(
        tmp_path / "tokenizer_config.json",
        bos_token="<s>",
        eos_token={"content": "</s>", "lstrip": False},
        chat_template=CHATML,
    )
    return tmp_path


def _write(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(fields))


def _rendered(
    source: str, *messages: dict[str, Any], add_generation_prompt: bool = True, **how: Any
) -> str:
    template = ChatTemplate({"default": source}, {})
    return template.render(messages, add_generation_prompt=add_generation_prompt, **how)


def test_text_makes_the_round_trip_untruncated(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode("once upon a time: zażółć 🙂")
    assert ids[0] == tokenizer.bos_id == 0 and len(ids) > 4
    assert tokenizer.decode(ids) == "once upon a time: zażółć 🙂"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.id_to_token(1) == "</s>" and tokenizer.id_to_token(10**12) is None


def test_ends_are_all_that_generation_config_config_and_the_tokenizer_name(directory: Path) -> None:
    for generation, config, ends in (
        (None, [2, 3], (2, 3, 1)),
        (None, None, (1,)),
        ([3, 1], 2, (3, 1, 2)),
        (3, 2, (3, 2, 1)),
    ):
        if generation is not None:
            _write(directory / "generation_config.json", eos_token_id=generation)
        _write(directory / "config.json", eos_token_id=config)
        assert Tokenizer.from_directory(directory).eos_ids == ends


_PLAIN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


@pytest.mark.parametrize("named_in", ["tokenizer_config.json", "added_tokens.json", "names alone"])
def test_tokens_that_files_beside_tokenizer_json_name_are_added_as_by_transformers(
    directory: Path, named_in: str
) -> None:
    before = Tokenizer.from_directory(directory).vocabulary
    decoder = {
        "tokenizer_config.json": {
            "3": {"content": "<|im_end|>", **_PLAIN, "special": False},
            f"{before + 1}": {"content": "<|eot|>", **_PLAIN, "special": True},
            f"{before}": {"content": "<tool>", **_PLAIN, "special": False},
        }
    }
    _write(
        directory / "tokenizer_config.json",
        eos_token="<|eot|>",
        additional_special_tokens=["<|eot|>", "<|im_start|>"],
        **({"added_tokens_decoder": of} if (of := decoder.get(named_in)) else {}),
    )
    if named_in == "added_tokens.json":
        _write(directory / named_in, **{"<|eot|>": before + 1, "<tool>": before, "<s>": 0})
    tokenizer = Tokenizer.from_directory(directory)
    tools = named_in != "names alone"
    end = before + tools
    assert tokenizer.token_to_id("<|eot|>") == end and tokenizer.eos_ids == (end,)
    assert tokenizer.encode("<|eot|><|im_end|>", add_special_tokens=False) == [end, 3]
    assert tokenizer.token_to_id("<tool>") == (before if tools else None)
    # transformers 5.24 returns this text for the same files
    assert tokenizer.decode(tokenizer.encode("<tool>a<|eot|><|im_end|>")) == "<tool>a"
    assert tokenizer.special_ids == {0, 1, 2, 3, end}
    assert tokenizer.token_bytes(end) == b"<|eot|>"
    assert tokenizers.Tokenizer.from_str(tokenizer.json).token_to_id("<|eot|>") == end


def test_the_ends_of_a_model_with_a_text_part_are_its_text_parts(directory: Path) -> None:
    _write(directory / "config.json", text_config={"eos_token_id": [2]})
    assert Tokenizer.from_directory(directory).eos_ids == (2, 1)


def test_what_a_model_wants_of_sampling_is_read_and_checked(directory: Path) -> None:
    assert Tokenizer.from_directory(directory).sampling_defaults == SamplingDefaults()
    path = directory / "generation_config.json"
    _write(
        path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=9, min_p=None
    )
    assert Tokenizer.from_directory(directory).sampling_defaults == SamplingDefaults(
        max_tokens=9, temperature=0.6, top_k=20, top_p=0.95
    )
    for name, value in (("top_p", 2), ("temperature", "hot"), ("top_k", 1.5)):
        _write(path, **{name: value})
        with pytest.raises(CheckpointError, match=rf"generation_config.json: {name} must be"):
            Tokenizer.from_directory(directory)


def test_a_conversation_is_rendered_and_encoded_without_a_second_bos(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    messages = [{"role": "user", "content": "a time?"}]
    text = tokenizer.apply_chat_template(messages)
    assert text == "<|im_start|>user\na time?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False).endswith(
        "<|im_end|>\n"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 2 and 0 not in ids and tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_conversation_may_end_within_its_last_message(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)

    def text(*words: str) -> str:
        messages = [{"role": "user", "content": one} for one in words]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True
        )

    assert text("a time", " once a ") == (
        "<|im_start|>user\na time<|im_end|>\n<|im_start|>user\n once a "
    )
    for words in ("e", "user", "", "a time"):  # also where the prompt has them elsewhere
        assert text("a time", words) == (
            f"<|im_start|>user\na time<|im_end|>\n<|im_start|>user\n{words}"
        )
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '[' + m.content | trim + ']' }}{% endfor %}"
    )
    tokenizer = Tokenizer.from_directory(directory)
    assert text(" a ", " once ") == "[a][once"
    (directory / "chat_template.jinja").write_text("{{ messages | length }}")
    tokenizer = Tokenizer.from_directory(directory)
    with pytest.raises(InvalidRequestError, match="does not display the content"):
        text("a time", "e")


LAST = (
    ("{{ messages[-1].content }};[{{ messages[-1].content }}]", "once ", "once ;[once "),
    ("{{ documents[0].text }}[{{ messages[-1].content }}] {{ documents[0].text }}", "x", "x[x"),
    ("[{{ messages[-1].content | upper }}]", "once", "[ONCE"),
    ("[{{ messages[-1].content | escape }}]", "a<b ", "[a&lt;b "),
    ("[{{ messages[-1].content | tojson }}]", 'a"b 12', '["a\\"b 12'),
    ("[{{ messages[-1].content.split('</think>')[-1] }}]", "<think>x</think>y", "[y"),
)


def test_a_prompt_ends_with_the_last_message_whatever_the_template_makes_of_it() -> None:
    for source, last, ends in LAST:
        text = _rendered(
            source,
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": last},
            continue_final_message=True,
            add_generation_prompt=False,
            arguments={"documents": [{"text": "x"}]},
        )
        assert text == ends, source


PARTS = [{"type": "text", "text": "once"}, {"type": "text", "text": "upon"}]
FORMS = {
    "{{ m.content }}": ("once", "once\nupon"),
    "{{ m.content | tojson }}": ('"once"', '"once\\nupon"'),
    "{% for p in m.content %}{{ p.text }};{% endfor %}": ("once;", "once;upon;"),
    "{% for p in m.content | selectattr('type', 'eq', 'text') %}{{ p['text'] }};{% endfor %}": (
        "once;",
        "once;upon;",
    ),
    # a template that reads the first part alone gets all of them as one
    "{{ m.content[0]['text'] }}": ("once", "once\nupon"),
    "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | map(attribute='text')"
    " | join('+') }}{% endif %}": ("once", "once+upon"),
    # text parts are understood only where the assistant calls no tool
    "{% if m.tool_calls or m.content is string %}{{ m.content }}{% else %}"
    "{{ m.content | map(attribute='text') | join }}{% endif %}": ("once", "onceupon"),
}


def test_content_reaches_a_template_in_the_form_that_it_displays() -> None:
    for form, (text, parts) in FORMS.items():
        source = "{% for m in messages %}" + form + "{% endfor %}"
        for role in ("user", "assistant", "tool", "system"):
            shown = [_rendered(source, {"role": role, "content": each}) for each in ("once", PARTS)]
            assert shown == [text, parts], (form, role)
            message = {"role": role, "content": PARTS}
            if "tool_calls" in form and role == "assistant":
                calling = message | {"tool_calls": [{"function": {}}]}
                assert _rendered(source, calling) == "once\nupon"
            ends = _rendered(source, message, continue_final_message=True)
            assert parts.rstrip(';"').startswith(ends) and ends, (form, role)


def test_a_template_sees_what_it_is_given_but_not_in_place_of_the_servers_words(
    directory: Path,
) -> None:
    (directory / "chat_template.jinja").write_text("{{ thinks }}{{ messages | length }}")
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.apply_chat_template([], arguments={"thinks": "no", "other": 1}) == "no0"
    for name in ("messages", "tools", "bos_token"):
        with pytest.raises(InvalidRequestError, match=f"must not set '{name}'"):
            tokenizer.apply_chat_template([], arguments={name: []})


def test_a_template_file_wins_and_named_templates_have_a_default(directory: Path) -> None:
    _write(
        directory / "tokenizer_config.json",
        chat_template=[{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}],
    )
    assert Tokenizer.from_directory(directory).apply_chat_template([]) == "d"
    (directory / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ messages | tojson }}{% generation %}g{% endgeneration %}"
    )
    _write(directory / "special_tokens_map.json", bos_token="<s>")
    assert (
        Tokenizer.from_directory(directory).apply_chat_template([{"content": "<ż>"}])
        == '<s>[{"content": "<ż>"}]g'
    )


def test_templates_are_found_and_chosen_as_transformers_does(directory: Path) -> None:
    """By name, in every place where a checkpoint may keep them; tools choose `tool_use`."""
    named = {"default": "d", "tool_use": "t{{ tools | length }}", "rag": "r"}

    def rendered() -> tuple[str, str]:
        tokenizer = Tokenizer.from_directory(directory)
        return (
            tokenizer.apply_chat_template([]),
            tokenizer.apply_chat_template([], tools=[{"type": "function"}]),
        )

    config = directory / "tokenizer_config.json"
    _write(config)
    _write(directory / "chat_template.json", chat_template="p")
    assert rendered() == ("p", "p")
    for given in ([{"name": k, "template": v} for k, v in named.items()], named):
        _write(config, chat_template=given)
        assert rendered() == ("d", "t1")
    more = directory / "additional_chat_templates"
    more.mkdir()
    (directory / "chat_template.jinja").write_text("j")
    assert rendered() == ("j", "j")
    (more / "tool_use.jinja").write_text("more {{ tools[0].type }}")
    assert rendered() == ("j", "more function")
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="templates named tool_use, none named default"):
        rendered()
    (more / "tool_use.jinja").unlink()
    _write(config, chat_template={"default": 7})
    with pytest.raises(CheckpointError, match="must be text, or texts by name, got dict"):
        rendered()


def test_a_template_sees_documents_and_all_special_tokens(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(
        "{{ additional_special_tokens | join(',') }} {{ documents[0].title if documents }}"
    )
    more = ["<a>", {"content": "<b>"}]
    _write(directory / "special_tokens_map.json", additional_special_tokens=more)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.apply_chat_template([]) == "<a>,<b> "
    documents = {"documents": [{"title": "x"}]}
    assert tokenizer.apply_chat_template([], arguments=documents) == "<a>,<b> x"


def test_messages_that_a_template_refuses_are_the_clients_error(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    for message in (
        {"role": "wizard", "content": "x"},
        {"role": "user"},
        {"content": "x"},
        {"role": "user", "content": 7},
    ):
        with pytest.raises(InvalidRequestError, match="chat template"):
            tokenizer.apply_chat_template([message])


def test_a_template_cannot_leave_its_sandbox() -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
    ):
        with pytest.raises(InvalidRequestError):
            _rendered(source)


def test_a_broken_template_or_none_is_said_by_name(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="does not compile"):
        Tokenizer.from_directory(directory).apply_chat_template([])
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidRequestError, match="has none"):
        Tokenizer.from_directory(directory).apply_chat_template([])


def test_broken_files_are_named(directory: Path, tmp_path: Path) -> None:
    _write(directory / "generation_config.json", eos_token_id="</s>")

    def read(folder: Path = directory) -> None:
        Tokenizer.from_directory(folder)

    with pytest.raises(CheckpointError, match="generation_config.json: eos_token_id"):
        read()
    _write(directory / "generation_config.json", eos_token_id=[3, 2**31])
    with pytest.raises(CheckpointError, match="config.json: eos_token_id must be a token id"):
        read()
    _write(directory / "generation_config.json", eos_token_id=list(range(16)))
    _write(directory / "config.json", eos_token_id=16)
    with pytest.raises(CheckpointError, match="eos_token_id may list 16 tokens, got 17"):
        read()
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer.json is not a readable tokenizer"):
        read()
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer.json"):
        read()
    with pytest.raises(CheckpointError, match="nowhere' does not exist; give one with"):
        read(tmp_path / "nowhere")
    said = "generation_config.json' is a file; give the directory that contains it"
    with pytest.raises(CheckpointError, match=said):
        read(directory / "generation_config.json")


@pytest.mark.parametrize(("way",), first_quick([("encode",), ("decode",)]))
def test_other_threads_run_while_a_long_text_is_worked_on(directory: Path, way: str) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    text = "once upon a time " * 50_000
    ids = tokenizer.encode(text)
    many = [*ids, *ids[1:]] * 4
    turns, over = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not over.wait(0.001):
            turns += 1

    other = threading.Thread(target=take_turns)
    other.start()
    before = turns
    worked = tokenizer.encode(text) if way == "encode" else tokenizer.decode(many)
    taken = turns - before
    over.set()
    other.join()
    assert worked == (ids if way == "encode" else text * 8)
    assert taken > 5


def test_text_and_ids_outside_their_range_are_refused(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    with pytest.raises(InvalidRequestError):
        tokenizer.encode("\ud800")
    with pytest.raises(InvalidRequestError):
        tokenizer.decode([-1])
    assert tokenizer.decode([9999]) == ""


NULLS = {
    "{{ m.content }}": "",
    "{% if m.content is none %}~{% else %}{{ m.content }}{% endif %}": "~",
    "{{ m.content + '!' }}": "!",
    "{% if m.content %}{{ m.content }}{% endif %}.": ".",
}


def test_null_reaches_a_template_that_can_display_it() -> None:
    """Elsewhere it is an empty text: nobody wrote the word None."""
    user, nothing = {"role": "user", "content": "x"}, {"role": "assistant", "content": None}
    for form, text in NULLS.items():
        source = "{% for m in messages %}{% if m.role == 'assistant' %}" + form
        assert _rendered(source + "{% endif %}{% endfor %}", user, nothing) == text, form


def test_a_role_is_taken_if_the_template_displays_it(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role in ['user', 'critic'] %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.apply_chat_template([{"role": "critic", "content": "hm"}]) == "hm"
    for number in range(200):  # clients choose them
        with pytest.raises(InvalidRequestError, match=f"no message of the role 'king{number}'"):
            tokenizer.apply_chat_template([{"role": f"king{number}", "content": "hm"}])
    assert tokenizer._chat is not None and len(tokenizer._chat._forms) <= 64


def test_numbers_of_a_generation_config_are_taken_as_others_take_them(directory: Path) -> None:
    for stated, read in (
        ({"top_k": 20.0}, SamplingDefaults(top_k=20)),
        ({"top_k": -1}, SamplingDefaults(top_k=0)),
        ({"max_new_tokens": 2048.0}, SamplingDefaults(max_tokens=2048)),
        ({"top_p": 0}, SamplingDefaults(top_p=LEAST_TOP_P)),
        ({"temperature": 0, "top_p": 1}, SamplingDefaults(temperature=0, top_p=1)),
    ):
        _write(directory / "generation_config.json", **stated)
        assert Tokenizer.from_directory(directory).sampling_defaults == read, stated
