"""The plots of the tiny stories, as templates: plain text, no code.

`[a|b|c]` is a free choice (nested, possibly empty), `{slot}` a member of the cast that stays the same through a story: H the
hero, F the friend, M the helper, with the pronouns he/him/his, fhe/fhim/fhis, mhe/mhim/mhis (capital for a sentence's start).
A plot is a list of paragraphs, each a list of sentences. `topic` completes "a story about ..."; `questions` have answers
that the story gives. Invariant: a later sentence only uses what an earlier one, or the opening, has told.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plot:
    topic: str
    paragraphs: tuple[tuple[str, ...], ...]
    questions: tuple[tuple[str, str], ...] = ()


PLOTS = (
    Plot(
        "a lost {toy}",
        (
            (
                (
                    "[[One day|One morning], {H}'s {M} gave {him} a {size} {color} {toy}.|{H} had a {size} {color} {toy}. It was a "
                    "gift from {his} {M}.]"
                ),
                "{He} [loved|liked] the {toy} [very much|more than anything] and took it [everywhere|to {place}].",
            ),
            (
                "[One day|That day|One sunny afternoon], {H} [played|ran and jumped] {inside} [for a long time|until the sun was low].",
                "When it was time to go home, the {toy} was gone!",
                "{H} was [very|so] sad and [began|started] to cry.",
                '"What is wrong?" asked {F}.',
                '"[I lost my {color} {toy}|I cannot find my {toy}|My {toy} is gone]," said {H}.',
                '"[Do not worry|Do not cry]," said {F}. "[I will help you look for it|We will find it together]."',
            ),
            (
                "They looked {spot1}, but [it was not there|there was no {toy}].",
                "[Then they|They also] looked {spot2}, but they [only found a leaf|only saw a snail|found nothing].",
                "[At last|Finally], {F} looked {spot3}. [There it was!|Something {color} was there!]",
                '"[Look|Here it is]! I found your {toy}!" {F} [said|shouted|called].',
                '{H} [hugged {F}|jumped for joy] and said, "Thank you, {F}[! You are a good friend|]!"',
                "[After that, {H} always took good care of the {color} {toy}.|{H} held the {toy} all the way home.|]",
            ),
        ),
        (("What did {H} lose?", "{H} lost a {color} {toy}."), ("Who found the {toy}?", "{F} found the {toy}. It was {spot3}.")),
    ),
    Plot(
        "a {flying} in a tree",
        (
            (
                "[One day|One windy day], {H} and {F} went to {place} with a {color} {flying}.",
                "[They played with it and laughed.|They took turns and had a lot of fun.]",
                "[Suddenly|Then], a strong wind came and [blew|carried] the {flying} up into a tall tree.",
                '"Oh no!" [said|cried] {H}. "[It is too high|I cannot reach it|My {flying} is stuck]!"',
            ),
            (
                "First, {H} [jumped as high as {he} could|tried to climb the tree], but [it was too high|{he} could not reach it].",
                "Then {F} [threw a stick at it|shook the tree|stood on a box], but the {flying} did not [move|come down].",
                "They [sat down and thought|did not know what to do].",
                '"[I have an idea|I know what to do]," said {F}. "[We should ask your {M} for help|Your {M} can help us]."',
            ),
            (
                "So they [ran|went] to {H}'s {M} and told {mhim} [everything|what had happened].",
                "{mHe} smiled and [brought a long ladder|took a long stick|lifted {H} up high].",
                "Soon, {H} had the {color} {flying} [in {his} hands|back] again.",
                '"Thank you, {Mom}!" said {H}. "[You are the best|Now we can play again]!"',
                "[They learned that it is good to ask for help.|They played until it was dark, far away from the tree.]",
            ),
        ),
        (("Where was the {flying}?", "It was in a tall tree."), ("Who helped {H}?", "{H}'s {M} helped {him}.")),
    ),
    Plot(
        "sharing",
        (
            (
                "[One day|One morning], {H}'s {M} made a [big|sweet|warm] {food} for {him}.",
                "{H} took the {food} to {place} and sat down [to eat|under a tree].",
                "[Then|Just then], {F} came by. {fHe} looked [sad|tired] and hungry.",
                '"[May I have some of your {food}|Can I have a bite|Will you share your {food} with me], please?" asked {F}.',
            ),
            (
                "{H} [thought for a moment|looked at the {food}]. [It smelled so good.|There was only one {food}.|]",
                (
                    "[{He} did not want to share at first, but then {he} saw {fhis} sad face.|{H} wanted to eat it all, but {he} "
                    "did not want {his} friend to be hungry.]"
                ),
                '"[Yes, we can share|Of course|Here you are]," said {H}, and {he} gave half of the {food} to {F}.',
                "They [sat together and ate|ate it together and talked]. It was the best {food} they had ever had.",
            ),
            (
                "[The next day|A few days later], {H} forgot {his} lunch and was hungry.",
                '{F} [smiled|came] and said, "You shared with me, so now I will share with you."',
                "{fHe} had [a basket full of|two big] [berries|apples|nuts|cookies] and gave {H} half of them.",
                "{H} learned that sharing makes [everyone happy|good friends].",
            ),
        ),
        (("What did {H} share?", "{H} shared a {food} with {F}."),),
    ),
    Plot(
        "a storm",
        (
            (
                "One [day|afternoon], {H} and {F} were playing {inside}.",
                "[The sun was warm and the sky was blue.|It was a beautiful day.]",
                "[But soon|Then] the sky turned [dark|gray] and [the wind began to blow|big drops of rain began to fall].",
                '"[A storm is coming|It is going to rain]!" [cried|said] {H}. "[Run|We must hide|Hurry]!"',
            ),
            (
                "They ran [as fast as they could|very fast] and found [an old house|a small cave|a big, hollow tree].",
                "Inside, it was dry and [warm|quiet]. [Boom! went the thunder.|The rain fell and fell.]",
                "{F} was [scared|afraid] and [began to shake|held {H}'s hand].",
                '"[Do not be afraid|It is only noise|We are safe here]," said {H}. "[Let us sing a song|I will tell you a funny story]."',
                "So they [sang|told stories] and laughed until the storm [was over|went away].",
            ),
            (
                "When they [looked|went] outside, the sun was [shining|out] again.",
                "There was a [beautiful|big|bright] rainbow over {place}!",
                '"[Look at all the colors|It is so pretty]!" said {F}.',
                "They [jumped in the puddles and got very wet|walked home under the rainbow].",
            ),
        ),
        (("What did they see after the storm?", "They saw a rainbow over {place}."),),
    ),
    Plot(
        "a lost {baby}",
        (
            (
                "One day, {H} was walking {inside} when {he} heard a [small|sad|tiny] sound.",
                "{He} looked {spot1} and saw a {baby}. It was [all alone|lost and cold].",
                '"[Hello, little one|Oh, you poor thing]," said {H}. "[Where is your mother|Are you lost]?"',
                "The {baby} [only cried|was too scared to speak|shook its head].",
            ),
            (
                "{H} [picked it up|held it close] and went to find {F}.",
                '"We must [find its mother|help this {baby}]," {he} said, and {F} [agreed|nodded].',
                "They looked {spot2}, but no one was there.",
                "They asked [an old man|a farmer|a woman with a basket], but no one had seen the mother.",
                "The {baby} was hungry, so {F} gave it [some milk|some bread|a warm blanket].",
            ),
            (
                "[At last|Finally], they heard a [loud|happy] call. It came from {spot3}.",
                "It was the mother! She [ran to|hugged] her baby and [was so happy|would not let it go].",
                '"Thank you[, kind friends|]," she said. "[I looked everywhere|I was so worried]."',
                "{H} and {F} waved goodbye. They felt [warm inside|proud|very good].",
            ),
        ),
        (("What did {H} find?", "{H} found a lost {baby}."),),
    ),
    Plot(
        "being brave",
        (
            (
                "{H} was [a good {kind}|{trait}], but {he} was afraid of one thing. {He} was afraid of {fear}.",
                "[One day|One evening], {his} friends asked {him} to {fear_act}.",
                (
                    '"[No, I cannot do it|I am too scared|I do not want to]," said {H}, and {he} [ran home|hid under the '
                    "bed|looked at the ground]."
                ),
            ),
            (
                "{His} {M} [sat down next to {him}|gave {him} a hug].",
                (
                    '"[Everyone is afraid sometimes|It is fine to be afraid]," {mhe} said. "[Being brave means that you try|When I '
                    'was small, I was afraid too]."'
                ),
                '"Will you [come with me|hold my hand]?" asked {H}.',
                '"[Yes, I will|Of course]," said {his} {M}.',
            ),
            (
                "So {H} [took a deep breath|closed {his} eyes] and [counted to three|held on tight].",
                "Then {he} tried to {fear_act}. [And nothing bad happened!|It was not so bad!]",
                '"I did it!" {H} [shouted|said with a smile]. "I am not afraid of {fear} any more!"',
                "{F} clapped and [cheered|said that {he} was very brave].",
            ),
        ),
        (("What was {H} afraid of?", "{H} was afraid of {fear}."), ("Who helped {H}?", "{H}'s {M} helped {him}.")),
    ),
    Plot(
        "a birthday",
        (
            (
                "[Today was|It was] {F}'s birthday, and {H} wanted to [make something special|give {fhim} a present].",
                '"[What can I give {fhim}|What does {F} like]?" {H} asked {his} {M}.',
                '"[You could make a {present}|A {present} would be nice]," said {his} {M}. [{H} thought it was a great idea.|]',
            ),
            (
                "{H} worked [all morning|for a long time] on the {present}.",
                "But [when it was almost done|just before the party], {he} made a mistake, and everything went wrong.",
                "{H} wanted to cry. [There was so little time!|The party was about to start!]",
                (
                    '"[Let us try again|I will help you|We still have time]," said {his} {M}. [Together they made a new one.|They '
                    "worked very fast.]"
                ),
            ),
            (
                "At the party, there were [balloons|games] and [music|sweet things to eat].",
                "{H} gave the {present} to {F}. [It was not perfect.|It was a little crooked.|]",
                '"[This is my favorite present|You made this for me]!" said {F}. "[Thank you so much|I love it], {H}!"',
                "[Everyone sang and danced until it was late.|They ate cake and played games all day.]",
            ),
        ),
        (("What did {H} give to {F}?", "{H} gave {F} a {present}."),),
    ),
    Plot(
        "a {plant}",
        (
            (
                "[One spring day|In the spring], {H} found a [tiny|little|strange] seed.",
                '"[What is this|What will it be]?" {he} asked {F}. "[Let us plant it and see|We can plant it in the garden]," said {F}.',
                "They [dug a small hole|made a hole in the ground] and put the seed [inside|into it].",
            ),
            (
                "Every [day|morning], {H} gave it [water|some water]. But [nothing happened|there was nothing to see].",
                '"[It will never grow,|Why does it not grow?]" said {H}[ sadly|].',
                '"[You must wait|Good things take time|Be patient]," said {his} {M}.',
                "So {H} waited. [It rained, and then the sun came out.|Days went by, and then weeks.]",
                "[One morning|Then one day], there was a [tiny green leaf|little green plant] in the ground!",
            ),
            (
                "It grew [bigger and bigger|taller every day]. [In the summer|By the end of summer], it was a [beautiful|big] {plant}.",
                '"[We did it|Look how big it is]!" {H} [said|shouted], and {F} [danced around it|clapped].',
                "{H} learned that [it is good to be patient|good things take time].",
            ),
        ),
        (("What grew from the seed?", "A {plant} grew from the seed."),),
    ),
    Plot(
        "telling the truth",
        (
            (
                "[One day|One rainy day], {H} was playing with a {color} ball [in the house|inside the house].",
                "{His} {M} had told {him} [not to|never to] do that.",
                "[The ball flew through the room|{H} threw the ball too hard] and hit the {broken}. Crash! The {broken} broke.",
                "{H} was [scared|worried]. {He} [hid the pieces|put the pieces] under the bed.",
            ),
            (
                'When {his} {M} came home, {mhe} asked, "[Where is the {broken}|Who broke my {broken}]?"',
                '"[I do not know|It was not me]," said {H}. But {his} [tummy felt bad|heart felt heavy].',
                "{He} [went outside|sat on the step] and told {F} what had happened.",
                '"[You should tell the truth|It is better to be honest]," said {F}.',
            ),
            (
                '{H} went back to {his} {M}. "[I am sorry|I did a bad thing]. I broke the {broken}," {he} said.',
                "{His} {M} [looked at {him} for a moment and then smiled|was not angry for long].",
                (
                    '"[Thank you for telling the truth|I am glad that you told me]," {mhe} said. "[We can fix it together|A '
                    '{broken} is only a thing]."'
                ),
                "{H} felt [much better|light and happy]. {He} [promised to|would] always tell the truth.",
            ),
        ),
        (("What did {H} break?", "{H} broke the {broken}."),),
    ),
    Plot(
        "a race",
        (
            (
                "[One day|One summer day], there was a big race {inside}. [Everyone came to watch.|]",
                "{H} wanted to win. [{He} had practiced every day.|{He} was very fast.] {F} [wanted to run too|was in the race too].",
                '"Ready, set, go!" [shouted|called] {H}\'s {M}, and they all [ran|began to run].',
            ),
            (
                "{H} ran [past|by] the trees and was [soon|quickly] in first place.",
                "[But then|Suddenly], {he} heard a cry. {F} had [fallen down|tripped over a stone] and [hurt {fhis} leg|could not get up].",
                (
                    "{H} [stopped|looked back]. [{He} could still win the race.|The end of the race was very near.] [But {F} was "
                    "{his} friend.|What should {he} do?]"
                ),
                "{H} turned around and [ran back|went back] to help {F}.",
            ),
            (
                '"[Why did you stop?|You could have won,]" said {F}. "[A friend is more important than a race|You need me]," said {H}.',
                (
                    "[They walked slowly to the end, side by side.|{H} helped {F} walk, and they finished together.] They were "
                    "last, but everyone [cheered|clapped for them]."
                ),
                "{H}'s {M} gave [them both|each of them] a [medal|golden star] for being [kind|good friends].",
            ),
        ),
        (("Who fell down in the race?", "{F} fell down, and {H} went back to help."),),
    ),
    Plot(
        "a secret box",
        (
            (
                "[One day|One morning], {H} was digging {inside} and found an old box {spot1}.",
                "It was [heavy|covered with dirt], and it was locked.",
                (
                    '"[What is inside|What could it be]?" {he} asked. {F} [came to look|shook the box], but [it did not open|{fhe} '
                    "did not know]."
                ),
                '"[We need a key|There must be a key]," said {F}.',
            ),
            (
                "They [searched|looked] for the key {spot2}. It was not there.",
                (
                    "They [searched|looked] for it {spot3}. [There, they saw something shiny.|Something shiny was there!] It was a "
                    "[small|little|rusty] key!"
                ),
                "{H} put the key into the lock and turned it. Click! The box [was open|opened].",
            ),
            (
                "Inside, there was {treasure}!",
                '"[It is beautiful|I cannot believe it]!" said {H}. They [took it|showed it] to {H}\'s {M}.',
                '"[I lost that when I was little|That was mine a long time ago]," {mhe} [said|told them] with happy tears in {mhis} eyes.',
                "{H} gave it back, and {his} {M} gave them [both a big hug|a {food} to share].",
            ),
        ),
        (("What was in the box?", "There was {treasure} in the box."), ("Where was the box?", "The box was {spot1}.")),
    ),
    Plot(
        "a sick friend",
        (
            (
                "One [day|morning], {H} waited for {F} {inside}, but {F} did not come.",
                '"[Where is {F}|Why is {F} late]?" {H} [asked {his} {M}|wondered].',
                "{H} went to {F}'s house and knocked on the door. {F} was in bed. {fHe} was sick.",
            ),
            (
                '"[I feel so bad|My head hurts], and I cannot play," said {F}.',
                "{H} wanted to make {fhim} feel better. {He} [ran|went] home and asked {his} {M} for help.",
                "They made some [hot soup|warm tea|chicken soup] and packed [a {food}|a {color} blanket] too.",
                "{H} [took it|carried everything] to {F} and [read {fhim} a story|told {fhim} a funny story|sang {fhim} a song].",
            ),
            (
                "[Every day|For three days], {H} came to visit. {F} [got better and better|felt a little better each day].",
                '[At last|Then one morning], {F} [jumped out of bed|ran outside]. "I am well again!" {fhe} [said|shouted].',
                '"[You helped me so much|You are a true friend], {H}. Thank you."',
                "[And they ran to {place} to play.|Then they went to {place}, and they played all day long.]",
            ),
        ),
        (("Who was sick?", "{F} was sick."),),
    ),
    Plot(
        "learning to {skill}",
        (
            (
                "{H} [wanted|had always wanted] to learn to {skill}. [All {his} friends could do it.|{F} could do it very well.]",
                "[One day|One morning], {he} tried [alone|by {himself}], but [it was too hard|it went wrong].",
                '"[I will never learn to {skill}|It is too hard]," {H} said, and {he} [sat down|kicked a stone].',
            ),
            (
                '{F} [heard {him}|sat down next to {him}]. "[It took me a long time too|I can show you how]," {fhe} said.',
                "So every [day|afternoon], they met {inside} and practiced.",
                (
                    "[The first day was hard.|The first time, {H} made many mistakes.] [The second day was a little better.|The "
                    "second time, there were not so many.]"
                ),
                "{H} did not give up.",
            ),
            (
                "[Then one day|After a week], {H} could do it! [{He} could {skill} all by {himself}.|]",
                '"[Look at me|I can do it]!" {he} [shouted|called]. {F} [clapped {fhis} hands|was so proud].',
                '"[You worked very hard|I knew you could do it]," said {his} {M}.',
                "{H} learned that [you should never give up|you can do hard things when you try again and again].",
            ),
        ),
        (("What did {H} learn?", "{H} learned to {skill}."),),
    ),
    Plot(
        "a {job}",
        (
            (
                "[Near {place}|In the village], there lived an old {job} who had the best {jobthing} in the world.",
                "[One day|One morning], the {job} [looked very sad|was sitting on a chair outside].",
                (
                    '"[What is the matter|Why are you sad]?" asked {H}. "[My back hurts|I am old and tired], and there is too much '
                    'work," said the {job}.'
                ),
            ),
            (
                '"[I can help you|We will help you]!" said {H}. {He} [called|ran to get] {F}, and they [started|began] to work.',
                (
                    "{H} [swept the floor|carried water|washed the windows], and {F} [carried the heavy bags|fixed the "
                    "door|cleaned the table]."
                ),
                "They worked [until the evening|all day long]. [They were tired, but they did not stop.|They sang while they worked.]",
            ),
            (
                "When they were done, the {job} [smiled|laughed for joy].",
                '"[You are so good to me|You have kind hearts]," he said. "[I want to give you something|Please take this]."',
                "He gave them some {jobthing} to take home. [It was a wonderful gift.|They said thank you.]",
                "{H}'s {M} was very proud of {him}.",
            ),
        ),
        (("Who did {H} help?", "{H} helped an old {job}."),),
    ),
)
