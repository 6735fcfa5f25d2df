"""What is said to the tiny models and answered besides stories: templates in the form of `plots`. Plain data."""

PERSONAS = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "You tell short stories to children.",
    "You are a small model that writes simple stories.",
    "Answer in simple words.",
)

# "{topic}" is the plot's own; the rest is the cast's.
REQUESTS = (
    "[Tell|Please tell] me a story about a {kind}.",
    "[Can|Could] you tell me a story about a {kind}?",
    "Tell me a story about a {kind} named {H}.",
    "[Tell me|Write|Write me] a [short |]story about a {kind} and a {fkind}.",
    "[Tell me|Write|I want] a story about {topic}[.|, please.]",
    "Tell me a story about {H} and {F}.",
    "[Write|Please write] a story about {H}.",
    "Tell me a [short |bedtime |happy |]story.",
    "[Write|Tell me] a story about a {trait} {kind}.",
    "Can you tell me a story about a {kind} and {topic}?",
    "[A story about a {kind}, please.|I would like a story about a {kind}.|Do you know a story about a {kind}?]",
    "Once upon a time, there was a {kind} named {H}. What happened next?",
    "Tell me what happened {inside}.",
)

HELLOS = ("Hello!", "Hi!", "Hello", "Good morning!", "Hi there!", "Hey!", "Good evening!", "Hello, how are you?")
ANSWERS_TO_HELLO = (
    "Hello! [Would you like to hear|Shall I tell you] a story?",
    "Hi! What should my story be about?",
    "Hello, my friend! I know many stories.",
)

OTHER_TALK = (
    (
        "[Who are you?|What are you?|What is your name?]",
        "I am a very small model. I [tell|write] short stories about [children and animals|friends and adventures].",
    ),
    (
        "[What can you do?|How can you help me?|Can you help me?]",
        "I can tell you a short story. You can ask me for a story about a {kind}.",
    ),
    (
        "[Thank you!|Thanks!|That was a nice story.]",
        "You are welcome! [Come back when you want another story.|I am glad that you liked it.]",
    ),
    ("[Goodbye!|Bye!|Good night!]", "[Goodbye! See you soon.|Good night, and sweet dreams!]"),
    ("What color is the {toy}?", "The {toy} is {color}."),
    ("[Name|Tell me] a color.", "[Red|Blue|Green|Yellow] is a nice color."),
    ("[Name|Tell me] an animal.", "A {fkind} is an animal that I like in my stories."),
)
