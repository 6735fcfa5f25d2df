"""Writes the tiny models' training text: short stories and short conversations about them, from
templates.

A document is the text of one training sequence, special tokens included but without BOS: a story
and `</s>`, or a conversation in the form of the chat template. `document(seed, index)` is a pure
function, so any part of the endless corpus can be generated without the rest. Held-out documents
have other indices than training documents."""

import random
import re
from collections.abc import Iterator

from tools.tiny_models.stories import STORIES, Plot

WORDS, FRAMES, TALK, PLOTS = STORIES.words, STORIES.frames, STORIES.talk, STORIES.plots
END_OF_TEXT = "</s>"
END_OF_TURN = "<|end|>"
TURN = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}

_INNERMOST_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_A_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiou])")
_HELD_OUT = 1 << 40


def document(seed: int, index: int, *, held_out: bool = False) -> str:
    """Generates document number `index` of the corpus with this seed. Held-out documents come from
    the same templates but are not used for training."""
    rng = random.Random(seed * (1 << 42) + index + (_HELD_OUT if held_out else 0))
    if rng.random() < 0.68:
        return story(rng) + END_OF_TEXT
    return _talk(rng) + END_OF_TEXT if rng.random() < 0.25 else _talk(rng)


def documents(seed: int, *, held_out: bool = False) -> Iterator[str]:
    """Yields the documents of the endless corpus, from the first on."""
    index = 0
    while True:
        yield document(seed, index, held_out=held_out)
        index += 1


def vocabulary_of(texts: list[str]) -> set[str]:
    """Returns the set of words that occur in the documents. A word consists of letters only and
    keeps its case."""
    return {
        word for text in texts for word in re.findall(r"[A-Za-z]+", re.sub(r"<[^>]*>", " ", text))
    }


def story(rng: random.Random) -> str:
    """Generates a story of one to three plots around the same hero."""
    cast = _cast(rng)
    return _tell(rng, cast, _plots(rng))


def _plots(rng: random.Random) -> list[Plot]:
    return rng.sample(PLOTS, rng.choices((1, 2, 3, 5), weights=(78, 14, 6, 2))[0])


def _tell(rng: random.Random, cast: dict[str, str], plots: list[Plot]) -> str:
    opening = [rng.choice(FRAMES.openings), rng.choice(FRAMES.habits), rng.choice(FRAMES.friends)]
    plain_beginnings = 0.15
    if rng.random() < plain_beginnings:
        opening = [
            (
                "[{H} had|There was a {kind} named {H} who had] a [good|best] friend named {F}, a"
                " {fkind}."
            ),
            *opening[1:2],
        ]
    paragraphs = [opening]
    for number, plot in enumerate(plots):
        if number:
            paragraphs.append([rng.choice(FRAMES.bridges)])
        first, *others = plot.paragraphs
        joined = number > 0 or rng.random() < 0.4
        if joined:
            paragraphs[-1] = [*paragraphs[-1], *first]
        else:
            paragraphs.append(list(first))
        paragraphs += [list(other) for other in others]
    paragraphs[-1].append(rng.choice(FRAMES.endings))
    return "\n\n".join(
        _write(rng, cast, " ".join(filter(None, paragraph))) for paragraph in paragraphs
    )


def _write(rng: random.Random, cast: dict[str, str], template: str) -> str:
    """Expands a template: replaces each `[a|b]` by a random alternative, innermost first, and then
    each `{slot}` by its value in `cast`."""
    while (match := _INNERMOST_CHOICE.search(template)) is not None:
        template = (
            template[: match.start()] + rng.choice(match[1].split("|")) + template[match.end() :]
        )
    text = _SLOT.sub(lambda slot: cast[slot[1]], template)
    text = re.sub(r"  +", " ", text).strip()
    return _A_BEFORE_VOWEL.sub(r"\1n ", text)


def _cast(rng: random.Random) -> dict[str, str]:
    """Draws the characters and things of one story."""
    hero_kind, hero, he = _person(rng, ())
    friend_kind, friend, friend_he = _person(rng, (hero, hero_kind))
    helper = rng.choice(sorted(WORDS.helpers))
    place = rng.choice(WORDS.places)
    spots = rng.sample(place.spots, 3)
    fear = rng.choice(sorted(WORDS.fears))
    job = rng.choice(sorted(WORDS.jobs))
    cast = {
        "H": hero,
        "kind": hero_kind,
        "F": friend,
        "fkind": friend_kind,
        "M": helper,
        "Mom": helper.capitalize(),
    }
    for prefix, pronoun in (("", he), ("f", friend_he), ("m", WORDS.helpers[helper])):
        cast |= _pronouns(prefix, pronoun)
    cast |= {
        "place": place.name,
        "inside": place.inside,
        "spot1": spots[0],
        "spot2": spots[1],
        "spot3": spots[2],
    }
    cast |= {"fear": fear, "fear_act": WORDS.fears[fear], "job": job, "jobthing": WORDS.jobs[job]}
    tables = {
        "color": WORDS.colors,
        "size": WORDS.sizes,
        "toy": WORDS.toys,
        "flying": WORDS.flying,
        "food": WORDS.foods,
        "plant": WORDS.plants,
        "baby": WORDS.babies,
        "broken": WORDS.breakables,
        "treasure": WORDS.treasures,
        "skill": WORDS.skills,
        "present": WORDS.presents,
    }
    cast["trait"], cast["trait2"] = rng.sample(WORDS.traits, 2)
    return cast | {slot: rng.choice(table) for slot, table in tables.items()}


def _person(rng: random.Random, others: tuple[str, ...]) -> tuple[str, str, str]:
    """Draws kind, name and pronoun of a character that differs from `others`."""
    while True:
        kind = (
            rng.choice(sorted(WORDS.children)) if rng.random() < 0.5 else rng.choice(WORDS.animals)
        )
        name = rng.choice(WORDS.children.get(kind, WORDS.girls + WORDS.boys))
        if name not in others and kind not in others:
            return kind, name, "she" if name in WORDS.girls else "he"


def _pronouns(prefix: str, he: str) -> dict[str, str]:
    words = (
        {"he": he, "him": "her", "his": "her", "himself": "herself"}
        if he == "she"
        else {w: w for w in ("he", "him", "his", "himself")}
    )
    lower = {prefix + key: word for key, word in words.items()}
    # {He} for the hero, {fHe} and {mHe} for the others.
    return lower | {prefix + key.capitalize(): word.capitalize() for key, word in words.items()}


def _talk(rng: random.Random) -> str:
    """Generates a conversation in the format of the chat template. Most conversations are a request
    for a story, optionally followed by questions about the story."""
    turns: list[tuple[str, str]] = []
    cast = _cast(rng)
    if rng.random() < 0.3:
        turns.append(("system", rng.choice(TALK.personas)))
    if rng.random() < 0.15:
        turns += [
            ("user", rng.choice(TALK.hellos)),
            ("assistant", _write(rng, cast, rng.choice(TALK.answers_to_hello))),
        ]
    if rng.random() < 0.1:
        question, answer = rng.choice(TALK.other_talk)
        turns += [("user", _write(rng, cast, question)), ("assistant", _write(rng, cast, answer))]
    else:
        plot = rng.choice(PLOTS)
        request = rng.choice(TALK.requests).replace("{topic}", plot.topic)
        turns += [("user", _write(rng, cast, request)), ("assistant", _tell(rng, cast, [plot]))]
        general = (
            ("Who was {F}?", "{F} was {H}'s friend, a {fkind}."),
            ("What was the name of the {kind}?", "The name of the {kind} was {H}."),
        )
        questions = list(plot.questions + general)
        rng.shuffle(questions)
        for question, answer in questions[: rng.choices((0, 1, 2), weights=(50, 35, 15))[0]]:
            turns += [
                ("user", _write(rng, cast, question)),
                ("assistant", _write(rng, cast, answer)),
            ]
    return "".join(TURN[role] + text + END_OF_TURN for role, text in turns)
