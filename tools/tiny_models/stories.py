"""The words and templates of the tiny stories, read from `stories.json`: plain data without
randomness.

Words are characters, places and things. A name has one fixed set of pronouns (a small model cannot
infer them from a name), and a place has its own hiding spots, so that a story drawn from these
tables is coherent by construction.

Frames (text around a plot: openings, habits, friends, bridges, endings), conversations and plots
are templates. `[a|b|c]` is a free choice (nested, possibly empty). `{slot}` is a member of the cast
that stays the same through a story: H the hero, F the friend, M the helper, with the pronouns
he/him/his, fhe/fhim/fhis, mhe/mhim/mhis (capitalised at a sentence's start). A plot is a list of
paragraphs, each a list of sentences. A plot's `topic` completes "a story about ...", and its
`questions` have answers in the story. Invariant: a sentence only uses facts of earlier sentences or
the opening."""

from pathlib import Path

import msgspec

Texts = tuple[str, ...]
Pairs = tuple[tuple[str, str], ...]


class Place(msgspec.Struct, frozen=True):
    """A place in a story. `inside` is its name with a preposition ("in the park"). `spots` are its
    hiding places for things."""

    name: str
    inside: str
    spots: Texts


class Words(msgspec.Struct, frozen=True):
    girls: Texts
    boys: Texts
    animals: Texts
    babies: Texts
    traits: Texts
    colors: Texts
    sizes: Texts
    toys: Texts
    flying: Texts
    foods: Texts
    plants: Texts
    fears: dict[str, str]
    breakables: Texts
    treasures: Texts
    skills: Texts
    jobs: dict[str, str]
    presents: Texts
    helpers: dict[str, str]
    places: tuple[Place, ...]

    @property
    def children(self) -> dict[str, Texts]:
        """Returns the given names for each kind of child, such as "girl" or "prince"."""
        return {"girl": self.girls, "boy": self.boys, "princess": self.girls, "prince": self.boys}

    @property
    def remembered(self) -> Texts:
        """Returns the words, other than names, that a reader must remember to follow a story."""
        return (
            *("he", "she", "his", "her", "him", "He", "She", "His", "Her"),
            *(*self.children, *self.animals, *self.colors, *self.toys, *self.foods),
            *(*self.breakables, *self.skills, *self.jobs, *self.presents, *self.helpers),
            *(place.name.removeprefix("the ") for place in self.places),
        )


class Frames(msgspec.Struct, frozen=True):
    openings: Texts
    habits: Texts
    friends: Texts
    endings: Texts
    bridges: Texts


class Talk(msgspec.Struct, frozen=True):
    personas: Texts
    requests: Texts
    hellos: Texts
    answers_to_hello: Texts
    other_talk: Pairs


class Plot(msgspec.Struct, frozen=True):
    topic: str
    paragraphs: tuple[Texts, ...]
    questions: Pairs


class Stories(msgspec.Struct, frozen=True):
    words: Words
    frames: Frames
    talk: Talk
    plots: tuple[Plot, ...]


STORIES = msgspec.json.decode(Path(__file__).with_name("stories.json").read_bytes(), type=Stories)
