"""What stands around a plot: how stories open, who is in them, how they end, and what joins two plots. Templates as in `plots`."""

OPENINGS = (
    "Once upon a time, there was a [|{trait} |little |small |young ]{kind} named {H}.",
    (
        "Once upon a time, [in a small village|in a little house|far away|near the sea|in a quiet town], there lived a "
        "{trait} {kind} named {H}."
    ),
    "Once there was a [{trait} |little |]{kind} [named|called] {H}.",
    "Long ago, [there was|there lived] a {trait} {kind} named {H}.",
    "{H} was a [{trait}|little|young] {kind}[| who lived in a small house| who lived near the sea].",
    "A [little|{trait}] {kind} named {H} lived [in a small village|in a little house|on a hill|near the sea].",
    "[There was once|There once was] a {trait} {kind}. {His} name was {H}.",
    "In a [small|quiet|little] [town|village], there lived a {kind} named {H}.",
    "This is the story of {H}, a {trait} {kind}.",
    "{H} had a [small|little|nice] house [near the sea|on a hill] and a [dear|kind] {M}.",
)

HABITS = (
    "{He} [loved|liked] to [play|run and jump|walk|sing songs] {inside}.",
    "[Every day|Every morning], {he} [played|went for a walk|sang a song] {inside}.",
    "{He} was {trait2}[ and always smiled| and everyone loved {him}|].",
    "{He} [lived|shared a house] with {his} {M}, and they were [very|] happy.",
    "",
)

FRIENDS = (
    "{His} best friend was [a {fkind} named {F}|{F} the {fkind}].",
    "{He} had a [good|dear|best] friend, a {fkind} named {F}.",
    "{H} and [{his} friend {F}|{F}], [a {fkind}|who was a {fkind}], [played together every day|did everything together].",
    "{H} had a [good|best|funny] friend named {F}. {F} was a {fkind}.",
)

ENDINGS = (
    "[From that day on|After that day], {H} and {F} were [the best of friends|even better friends].",
    "{H} [went to bed|fell asleep] with a [big|happy] smile that night.",
    "It was the best day [ever|of the whole year].",
    "They [all|both] lived happily ever after.",
    "That night, {H} dreamed about {place} and was very happy.",
    "Everyone was happy, and {H} [smiled|laughed|danced] all the way home.",
    "{H} never forgot that day.",
    "And {H} was the happiest {kind} in the [world|village].",
    '"[What a day|What a lovely day|This was the best day]!" said {H}. And {F} agreed.',
)

BRIDGES = (
    "The next [day|morning], {H} woke up early. [The birds were singing.|It was time for a new adventure.|{He} felt happy.]",
    "[A few days later|A week later|Soon after that], {H} had another adventure.",
    "But that was not the end of the story.",
    "[Winter came and went.|Many days went by.] {H} and {F} were still [good|best] friends.",
)
