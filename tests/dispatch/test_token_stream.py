"""Streamed text against decoding at once, with real tokenizers of both kinds, and stop strings
against `str.find`."""

import functools
import os.path
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jdisagg.dispatch.token_stream import MAX_WINDOW_TOKENS, StopStrings, TextDelta, TokenStream
from tests.lanes import given_examples

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's a fine day, isn't it? Numbers: 12345, 3.14.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。漢字漢字",
    "😀😃😄👍🏽👨‍👩‍👧‍👦 emoji   and  spaces\n\n\ttabs",
    "नमस्ते दुनिया مرحبا بالعالم",
]
TEXTS = st.text(
    alphabet=st.sampled_from(sorted(set("".join(CORPUS)) | set("ÿ𝄞한글ñ"))), max_size=40
)


class Decoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.longest = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@functools.cache
def byte_level() -> Decoder:
    """As GPT-2, Llama 3 and Qwen: tokens are byte strings, which may begin and end within a
    character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return Decoder(tokenizer)


@functools.cache
def byte_fallback() -> Decoder:
    """As Llama 2 and Mistral: a word begins with a space that the first word loses; unknown
    characters are byte tokens."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *sorted(set(CORPUS[0]) - {" "}),
    ]
    merges = [
        ("▁", "t"),
        ("h", "e"),
        ("▁t", "he"),
        ("o", "x"),
        ("▁", "f"),
        ("▁f", "ox"),
        ("▁", "d"),
        ("▁", "▁"),
    ]
    pieces += [left + right for left, right in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return Decoder(tokenizer)


KINDS = pytest.mark.parametrize(
    "kind", [byte_level, byte_fallback], ids=["byte level", "byte fallback"]
)


def text_in_context(decoder: Decoder, prompt: list[int], output: list[int]) -> str:
    """What the output adds to the prompt's text, decoded at once. The prompt's is counted up to its
    last whole character: with a character unfinished, a decoder may give up on whole ones before
    it."""
    whole = decoder.decode([*prompt, *output])
    texts = [decoder.decode(prompt[:end]) for end in range(len(prompt) + 1)]
    last_whole = max(end for end, text in enumerate(texts) if not text.endswith("\ufffd"))
    return whole[
        max(len(os.path.commonprefix([text, whole])) for text in (texts[-1], texts[last_whole])) :
    ]


def spans(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def run(stream: TokenStream, parts: list[list[int]]) -> tuple[list[str], int]:
    """The pieces, the last of which is what `finish` gave, and the tokens kept."""
    pieces, kept = [], 0
    for part in parts:
        delta = stream.push(part)
        pieces.append(delta.text)
        kept += delta.tokens_kept
    return [*pieces, stream.finish()], kept


@given_examples(50, 200, data=st.data(), text=TEXTS)
@KINDS
def test_pieces_of_any_spans_concatenate_to_the_text_decoded_at_once(
    kind, data: st.DataObject, text: str
) -> None:
    decoder = kind()
    ids = decoder.encode(text)
    prompt_tokens = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:prompt_tokens], ids[prompt_tokens:]
    pieces, kept = run(TokenStream(decoder, prompt), spans(data, output))
    assert "".join(pieces) == text_in_context(decoder, prompt, output)
    assert kept == len(output)
    assert "\ufffd" not in "".join(pieces)


@given_examples(66, 200, data=st.data())
def test_bytes_that_are_no_text_come_out_as_when_decoded_at_once(data: st.DataObject) -> None:
    decoder = byte_level()
    ids = data.draw(st.lists(st.integers(0, decoder.tokenizer.get_vocab_size() - 1), max_size=60))
    prompt_tokens = data.draw(st.integers(0, min(len(ids), 5)))
    prompt, output = ids[:prompt_tokens], ids[prompt_tokens:]
    pieces, _ = run(TokenStream(decoder, prompt), spans(data, output))
    assert "".join(pieces) == text_in_context(decoder, prompt, output)


@given_examples(25, 100, data=st.data())
@KINDS
def test_spans_do_not_change_the_text_even_of_arbitrary_tokens(kind, data: st.DataObject) -> None:
    decoder = kind()
    ids = data.draw(
        st.lists(
            st.integers(0, 258) | st.integers(0, decoder.tokenizer.get_vocab_size() - 1),
            max_size=40,
        )
    )
    one_by_one, _ = run(TokenStream(decoder, ids[:3]), [[token] for token in ids[3:]])
    any_spans, _ = run(TokenStream(decoder, ids[:3]), spans(data, ids[3:]))
    assert "".join(one_by_one) == "".join(any_spans)


@given_examples(25, 100, data=st.data(), text=TEXTS)
@KINDS
def test_a_stream_rebuilt_from_its_tokens_goes_on_as_the_first(
    kind, data: st.DataObject, text: str
) -> None:
    decoder = kind()
    ids = decoder.encode(text)
    stop = (
        data.draw(st.lists(st.text(alphabet=text, min_size=1, max_size=3), max_size=2))
        if text
        else []
    )
    moved = data.draw(st.integers(0, len(ids)))
    first, rebuilt = TokenStream(decoder, [], stop), TokenStream(decoder, [], stop)
    delivered = "".join(first.push([token]).text for token in ids[:moved])
    assert rebuilt.push(ids[:moved]).text == delivered
    for token in ids[moved:]:
        assert first.push([token]) == rebuilt.push([token])
    assert first.finish() == rebuilt.finish()


@given_examples(50, 200, data=st.data(), text=TEXTS.filter(bool))
@KINDS
def test_text_ends_before_or_after_the_stop_string_that_is_completed_first(
    kind, data: st.DataObject, text: str
) -> None:
    decoder = kind()
    ids = decoder.encode(text)
    whole = decoder.decode(ids)
    inside = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(
        lambda place: text[place[0] : place[0] + place[1]]
    )
    stop = data.draw(
        st.lists(inside | st.text(alphabet=text, min_size=1, max_size=3), min_size=1, max_size=3)
    )
    found = [(whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole]
    included = data.draw(st.booleans())
    stream = TokenStream(decoder, [], stop, include_stop=included)
    pieces, kept = run(stream, spans(data, ids))
    assert "".join(pieces) == (whole[: min(found)[not included]] if found else whole)
    assert stream.stopped == bool(found)
    if found:
        # all of it is in the tokens kept ...
        assert min(found)[0] <= len(decoder.decode(ids[:kept]))
        # ... and not in one fewer
        assert min(found)[0] > len(decoder.decode(ids[: kept - 1]).rstrip("\ufffd"))
    else:
        assert kept == len(ids)


@given_examples(
    100,
    300,
    text=st.text(alphabet="ab", max_size=30),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=3),
    data=st.data(),
)
def test_nothing_that_a_stop_string_could_still_take_back_is_let_out(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    stops, seen, given_out = StopStrings(stop), "", ""
    while text and not stops.matched:
        size = data.draw(st.integers(1, len(text)))
        seen, piece, text = seen + text[:size], text[:size], text[size:]
        given_out += stops.push(piece)
        if not stops.matched:
            beginnings = [n for s in stop for n in range(len(s)) if seen.endswith(s[:n])]
            assert given_out == seen[: len(seen) - max(beginnings, default=0)]


@given_examples(25, 50, data=st.data(), text=st.text(alphabet=sorted(set(CORPUS[0])), min_size=1))
@KINDS
def test_special_tokens_are_text_where_they_are_asked_for(
    kind, data: st.DataObject, text: str
) -> None:
    decoder = kind()
    special = decoder.encode("<end>" if kind is byte_level else "</s>")
    ids = decoder.encode(text)
    at = data.draw(st.integers(0, len(ids)))
    ids[at:at] = special
    pieces, _ = run(TokenStream(decoder, [], keep_special=True), spans(data, ids))
    assert "".join(pieces) == decoder.decode(ids, skip_special_tokens=False)


def test_a_character_in_several_tokens_comes_out_whole_and_at_once() -> None:
    decoder = byte_fallback()
    ids = decoder.encode("a漢😀b")
    stream = TokenStream(decoder, [])
    assert [stream.push([token]).text for token in ids[-9:]] == [
        "a",
        "",
        "",
        "漢",
        "",
        "",
        "",
        "😀",
        "b",
    ]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    for decoder in (byte_level(), byte_fallback()):
        ids = decoder.encode("漢\U0001f9ff")[:-1]
        stream = TokenStream(decoder, [])
        assert stream.push(ids).text == "漢"
        assert set(stream.finish()) == {"\ufffd"}


def test_a_broken_character_spoils_neither_its_neighbours_nor_the_stream() -> None:
    decoder = byte_fallback()
    lead, letter = decoder.tokenizer.token_to_id("<0xE6>"), decoder.encode("T")[-1]
    stream = TokenStream(decoder, [])
    ids = [*decoder.encode("T😀"), lead, letter, *decoder.encode("😀")[1:]]
    assert stream.push(ids).text + stream.finish() == "T😀\ufffdT😀"


def test_endless_invalid_bytes_come_out_and_the_window_stays_small() -> None:
    for decoder, invalid in ((byte_level(), None), (byte_fallback(), "<0xFF>")):
        token = (
            decoder.tokenizer.token_to_id(invalid)
            if invalid
            else next(i for i in range(1, 300) if decoder.decode([i]) == "\ufffd")
        )
        decoder.longest = 0
        stream = TokenStream(decoder, [token])
        text = "".join(stream.push([token]).text for _ in range(1000))
        assert len(text) >= 990
        assert decoder.longest <= MAX_WINDOW_TOKENS


@KINDS
def test_work_per_token_does_not_grow_with_the_stream(kind) -> None:
    decoder = kind()
    ids = decoder.encode(CORPUS[0] + CORPUS[2] + CORPUS[3]) * 20
    decoder.longest = 0
    TokenStream(decoder, []).push(ids)
    assert decoder.longest <= 40


def test_the_space_before_a_word_depends_on_the_prompt() -> None:
    decoder = byte_fallback()
    fox = decoder.tokenizer.token_to_id("▁fox")
    special = decoder.tokenizer.token_to_id("<s>")
    assert TokenStream(decoder, [special]).push([fox]).text == "fox"
    assert TokenStream(decoder, [special, fox]).push([fox]).text == " fox"
    assert TokenStream(decoder, [fox, *[special] * 30]).push([fox]).text == " fox"


def test_a_character_begun_by_the_prompt_is_finished_by_the_output() -> None:
    decoder = byte_fallback()
    ids = decoder.encode("T漢T")
    assert TokenStream(decoder, ids[:-3]).push(ids[-3:]).text == "漢T"
    assert TokenStream(decoder, ids[:-3]).push(ids[-1:]).text == "T"


def test_overrun_past_a_stop_string_is_not_kept() -> None:
    decoder = byte_level()
    ids = decoder.encode("one two STOP three")
    completing = next(n for n in range(len(ids)) if "STOP" in decoder.decode(ids[:n]))
    stream = TokenStream(decoder, [], ["STOP"])
    assert stream.push(ids) == TextDelta("one two ", completing, True)
    assert stream.push(ids) == TextDelta("", 0, True)
    assert stream.finish() == ""


def test_stop_strings_do_not_count_in_the_first_min_tokens() -> None:
    decoder = byte_level()
    ids = decoder.encode("xqzxqz")
    first = next(n for n in range(len(ids)) if decoder.decode(ids[:n]) == "xqz")
    stream = TokenStream(decoder, [], ["xqz"], min_tokens=first)
    assert stream.push(ids) == TextDelta("xqz", len(ids), True)
