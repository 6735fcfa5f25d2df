"""The dictionary of the tiny stories: who can act, where, with what. Plain data, no randomness.

A name has one pronoun set for ever (a small model cannot guess it), and a place knows its own hiding spots, so that a story
drawn from these tables is coherent by construction.
"""

from dataclasses import dataclass

GIRLS = ("Lily", "Anna", "Mia", "Emma", "Lucy", "Sara", "Amy", "Zoe", "Nora", "Ella", "Rosa", "Mei", "Aisha", "Ines", "Ruby", "Daisy")
BOYS = ("Tom", "Ben", "Sam", "Jack", "Leo", "Tim", "Max", "Finn", "Noah", "Omar", "Ravi", "Kofi", "Oscar", "Hugo", "Pip", "Milo")

CHILDREN = {"girl": GIRLS, "boy": BOYS, "princess": GIRLS, "prince": BOYS}
ANIMALS = ("dog", "cat", "rabbit", "bear", "fox", "mouse", "duck", "frog", "bird", "pig", "owl", "turtle", "squirrel", "dragon", "robot")
BABIES = ("kitten", "puppy", "duckling", "lamb", "chick", "baby bird", "baby fox", "baby rabbit")

TRAITS = ("kind", "brave", "curious", "clever", "gentle", "happy", "quiet", "cheerful", "careful", "funny")
COLORS = ("red", "blue", "green", "yellow", "purple", "orange", "white", "golden", "pink")
SIZES = ("big", "small", "little", "shiny", "new", "old", "pretty", "soft")
TOYS = ("ball", "kite", "boat", "doll", "hat", "drum", "book", "car", "scarf", "bell", "balloon", "train", "blanket", "basket", "ring")
FLYING = ("ball", "kite", "balloon", "hat", "scarf")
FOODS = ("apple", "cookie", "pear", "sandwich", "banana", "carrot", "pie", "bun", "cake", "pancake")
PLANTS = ("sunflower", "pumpkin", "carrot", "rose", "apple tree", "strawberry plant", "bean plant", "tulip")
FEARS = {
    "the dark": "turn off the lamp",
    "the water": "step into the water",
    "thunder": "listen to the storm",
    "big dogs": "say hello to a big dog",
    "high places": "climb up the ladder",
    "the new school": "go inside and say hello",
    "loud noises": "beat the big drum",
}
BREAKABLES = ("vase", "cup", "lamp", "plate", "window", "clock", "bowl", "mirror")
TREASURES = ("a pile of gold coins", "an old picture", "a silver ring", "a map of the stars", "a music box", "a letter", "a tiny crown")
SKILLS = (
    "swim",
    "ride a bike",
    "sing",
    "draw",
    "bake bread",
    "skate",
    "dance",
    "read",
    "whistle",
    "tie a knot",
    "paint",
    "count to one hundred",
)
JOBS = {"baker": "bread", "farmer": "corn", "painter": "pictures", "fisherman": "fish", "gardener": "flowers", "tailor": "coats"}
PRESENTS = ("cake", "card", "picture", "crown of flowers", "necklace", "song", "scarf", "pie")


@dataclass(frozen=True, slots=True)
class Place:
    """`name` follows 'in' or 'to' as `inside` and `toward` say; `spots` are where a thing can hide."""

    name: str
    inside: str
    spots: tuple[str, ...]


PLACES = (
    Place("the park", "in the park", ("under the bench", "behind a tall tree", "near the pond", "next to the swings", "in the sand")),
    Place("the forest", "in the forest", ("under a bush", "behind a rock", "in a hollow log", "near the stream", "under the leaves")),
    Place("the beach", "on the beach", ("behind a rock", "under the sand", "near the water", "inside a big shell", "next to a boat")),
    Place(
        "the garden", "in the garden", ("under the flowers", "behind the shed", "next to the fence", "in the tall grass", "near the well")
    ),
    Place("the farm", "on the farm", ("in the barn", "under the hay", "behind the cart", "next to the gate", "near the pigs")),
    Place("the meadow", "in the meadow", ("in the tall grass", "under an oak tree", "near the brook", "behind a hill", "next to a stone")),
    Place("the market", "at the market", ("under a table", "behind a basket", "next to the fruit", "near the fountain", "inside a box")),
    Place(
        "the castle", "in the castle", ("under the stairs", "behind a curtain", "next to the throne", "inside a chest", "near the tower")
    ),
)
HELPERS = {"mom": "she", "dad": "he", "grandma": "she", "grandpa": "he", "aunt": "she", "uncle": "he"}

# What a reader must remember to follow a story, names apart.
REMEMBERED = (
    *("he", "she", "his", "her", "him", "He", "She", "His", "Her"),
    *(*CHILDREN, *ANIMALS, *COLORS, *TOYS, *FOODS, *BREAKABLES, *SKILLS, *JOBS, *PRESENTS, *HELPERS),
    *(place.name.removeprefix("the ") for place in PLACES),
)
