"""Holds the word lists of the synthetic corpus: names, things, values, filler sentences.

Lists are plain tuples split from text, so that one look shows what the pocket model can have
seen. ``SLOTS`` and ``TEMPLATES`` drive :func:`kvcap.pocket.prose.filler`.
"""

from __future__ import annotations

import re


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in re.split(r"[|\n]", text) if part.strip())


ADJECTIVES = _words(
    "blue red green yellow white black silver golden purple orange brown grey small large old new "
    "heavy light round square wooden iron glass copper stone paper velvet dusty clean bright dark "
    "quiet loud narrow wide tall short warm cold northern southern eastern western upper lower "
    "front back left right hidden secret broken painted striped folding locked rusty royal tiny"
)
NOUNS = _words(
    "door gate box safe locker cabinet drawer suitcase trunk garage cellar attic room office desk "
    "library museum station tower bridge boat ship train bus bicycle car truck plane parcel letter "
    "book folder map lamp clock piano guitar camera phone laptop printer server router scanner "
    "garden fountain statue bench kitchen oven freezer barrel basket bottle bag chest vault shed "
    "barn mill harbour island village cottage castle studio theatre gallery clinic school lab "
    "warehouse elevator hallway window ladder wagon tent cabin kiosk"
)
FIRST_NAMES = _words(
    "Anna Ben Carla David Elena Felix Grace Henry Irene Jonas Karen Liam Maria Nora Oscar Paula "
    "Quinn Rosa Simon Tara Umar Vera Walter Xenia Yusuf Zoe Alan Bella Chloe Diego Emma Farid "
    "Greta Hugo Ivan Julia Kofi Laura Mateo Nadia Omar Priya Rahul Sofia Tomas Ursula Victor Wendy "
    "Alice Bruno Clara Dora Eric Fiona George Hanna Isaac Jane Kevin Lucy Martin Nina Oliver Peter "
    "Ruth Samuel Teresa Vincent"
)
LAST_NAMES = _words(
    "Adler Berg Castro Dunn Evans Fischer Garcia Hill Ito Jensen Keller Lopez Moreau Novak Olsen "
    "Park Quist Rossi Silva Turner Usman Vargas Weber Young Zhang Baker Cole Diaz Ellis Ford Grant "
    "Hughes Ivers Jones Khan Lind Mason Nolan Owens Price Reed Stone Tanaka Vance Wood Archer Bell "
    "Carter Drake Frost Gray Hart King Lane"
)
CITIES = _words(
    "Paris London Berlin Madrid Rome Vienna Oslo Lisbon Dublin Athens Cairo Lima Tokyo Kyoto Seoul "
    "Delhi Mumbai Sydney Boston Chicago Denver Austin Toronto Geneva Zurich Prague Warsaw Budapest "
    "Helsinki Lagos Nairobi Accra Bogota Havana Milan Naples Porto Seville Lyon Hamburg"
)
COLOURS = _words(
    "blue red green yellow white black silver purple orange brown grey pink teal violet crimson "
    "turquoise indigo amber ivory scarlet"
)
ANIMALS = _words(
    "cat dog horse rabbit fox wolf bear owl eagle falcon dolphin whale tiger lion otter badger "
    "hedgehog turtle penguin parrot camel deer goat sheep swan raven lizard beaver squirrel mouse"
)
FOODS = _words(
    "bread cheese soup rice pasta pizza salad apple banana cherry mango lemon olive tomato potato "
    "carrot mushroom chocolate honey yogurt pancake noodle dumpling curry stew cake waffle"
)
SYLLABLES = _words(
    "ba be bi bo da de di do fa fe ga go ka ke ko la le li lo lu ma me mi mo na ne no nu pa po ra "
    "re ri ro sa se si so ta te ti to tu va ve vi vo za ze zo sha tro gri plo ven dor mun tal quo "
    "bren stel kra dri fol wex"
)
NUMBER_NAMES = _phrases(
    "code|number|pin|access code|serial number|entry code|key number|ticket number|reference number"
)
PERSON_NUMBERS = _phrases(
    "phone number|badge number|room number|locker code|account number|seat number|staff number"
)
PERSON_WORDS: dict[str, tuple[str, ...]] = {
    "favourite colour": COLOURS,
    "favourite animal": ANIMALS,
    "favourite food": FOODS,
    "home town": CITIES,
    "best friend": FIRST_NAMES,
}

SLOTS: dict[str, tuple[str, ...]] = {
    "adj": ADJECTIVES,
    "noun": NOUNS,
    "first": FIRST_NAMES,
    "last": LAST_NAMES,
    "city": CITIES,
    "colour": COLOURS,
    "animal": ANIMALS,
    "food": FOODS,
    "person": _phrases(
        "the farmer|the teacher|an old sailor|the young doctor|her brother|his sister|the baker"
        "|a tall stranger|the captain|my neighbour|the painter|a quiet child|the shopkeeper"
        "|the driver|the librarian|our guide|the mayor|a tired nurse|the gardener|the musician"
    ),
    "did": _phrases(
        "walked slowly|waited for hours|stood alone|sat down|talked with friends|slept well"
        "|looked around|worked all day|sang an old song|read a letter|told a long story"
        "|watched the people|laughed out loud|drank a cup of tea|wrote a few lines|lost a glove"
    ),
    "place": _phrases(
        "by the river|near the market|in the old town|behind the church|on the hill|at the station"
        "|in the garden|under the bridge|along the coast|across the valley|beside the road"
        "|in a small cafe|at the edge of the forest|in the village square|by the open window"
    ),
    "time": _phrases(
        "in the morning|after lunch|before sunset|late at night|last summer|every Sunday"
        "|during the winter|at noon|for most of the day|until the evening"
        "|on the first day of spring|once a week|many years ago|on a rainy afternoon"
    ),
    "weather": _phrases(
        "rain|light snow|thick fog|strong wind|bright sunshine|heavy clouds|a cold breeze|warm air"
        "|a short storm|hail|frost|mild and dry weather"
    ),
    "region": _phrases(
        "the north|the south|the coast|the mountains|the eastern hills|the valley|the islands"
        "|most of the country|the western plains|the lake district"
    ),
    "group": _phrases(
        "the committee|the city council|the research team|the company|the board|the department"
        "|a group of students|the engineers|the union|the planning office|the sales team"
    ),
    "report": _phrases(
        "reviewed the plan|agreed on a new budget|published a short report|discussed the results"
        "|delayed the decision|asked for more time|approved the project|compared several options"
        "|raised a few concerns|thanked the volunteers|closed the meeting early"
    ),
    "plant": _phrases(
        "oak trees|wild roses|tall grasses|ferns|pine trees|young birches|mosses|poppies|ivy"
        "|apple trees|water lilies|mushrooms"
    ),
    "grow": _phrases(
        "grow well|bloom early|need little water|spread quickly|cover the ground|turn yellow"
        "|survive the cold|attract many bees|lose their leaves|hide the path"
    ),
    "beast": _phrases(
        "a fox|two herons|a flock of birds|an owl|a family of ducks|a deer|some rabbits|the bees"
        "|an old tortoise|a pair of swans|a squirrel|the frogs"
    ),
    "thing": _phrases(
        "a basket of apples|an old map|a box of tools|the evening paper|a red scarf|a broken watch"
        "|a loaf of bread|a pair of boots|a jar of honey|some flowers|an umbrella|a wooden chair"
        "|a bundle of letters|a new lamp|a pot of soup"
    ),
    "got": _phrases(
        "bought|carried|found|sold|repaired|forgot|painted|brought|borrowed|dropped|hid|wrapped"
    ),
    "mood": _phrases(
        "happy|tired|calm|curious|nervous|proud|patient|hungry|surprised|lonely|cheerful|worried"
    ),
    "science": _phrases(
        "light|sound|water|heat|the moon|the ocean|a magnet|the soil|a glacier|the wind|a crystal"
        "|pressure|the atmosphere|iron|salt"
    ),
    "fact": _phrases(
        "changes slowly over time|moves in waves|depends on temperature|can be measured with care"
        "|affects the life of many plants|was studied for centuries|is still not fully understood"
        "|follows a simple rule|behaves in a surprising way|stores a lot of energy"
    ),
    "craft": _phrases(
        "chop the onions|stir the sauce|knead the dough|wash the rice|heat the oven|peel the apples"
        "|sand the surface|mix the paint|cut the boards|fold the cloth|sharpen the knife"
        "|grease the pan|sort the screws"
    ),
    "how": _phrases(
        "with care|for a few minutes|until it is smooth|by hand|twice|as usual|before you go on"
        "|with a little salt|on a clean table|without any hurry"
    ),
    "view": _phrases(
        "I think|people say|it seems|everyone knew|she noticed|he believed|we heard|they hoped"
        "|it is said|nobody doubted"
    ),
    "link": _phrases("and then|because|while|although|so|but|and later|until|after|as soon as"),
    "count": _phrases("two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|a hundred"),
    "year": tuple(str(year) for year in range(1890, 2025)),
    "amount": tuple(str(amount) for amount in range(2, 400)),
}

TEMPLATES: dict[str, tuple[str, ...]] = {
    "story": _phrases(
        """{person} {did} {place} {time}.
        {first} {got} {thing} {place}.
        {first} and {first} {did} {time}, {link} {person} {did}.
        "I feel {mood} today," said {first}.
        {time}, {person} {got} {thing} and felt {mood}.
        {view} that {person} never came back to {city}.
        {person} looked {mood}, {link} {first} {did} {place}.
        There was {thing} {place}, and nobody knew why.
        {first} asked, "Have you seen {thing}?"
        The {adj} {noun} belonged to {person}.
        {person} had {count} children and {count} dogs.
        "Where is {first}?" asked {person}, but there was no answer."""
    ),
    "weather": _phrases(
        """{time}, {weather} is expected in {region}.
        {region} will see {weather} {time}.
        After {weather} comes {weather}, {view}.
        Temperatures in {city} will stay near {amount} degrees {time}.
        {weather} moved over {city}, {link} {weather} reached {region}.
        The forecast for {region} speaks of {weather} and {weather}.
        Drivers near {city} should watch out for {weather}.
        {region} had {weather} for {count} days."""
    ),
    "report": _phrases(
        """{group} {report} {time}.
        In {year}, {group} {report} in {city}.
        {group} {report}, {link} {group} {report}.
        {view} that {group} {report} too late.
        About {amount} people took part, and {group} {report}.
        {first} {last} of {group} spoke about the {adj} {noun}.
        Costs rose by {amount} percent in {year}.
        According to {first} {last}, {group} {report}.
        The next meeting takes place in {city} {time}."""
    ),
    "nature": _phrases(
        """{plant} {grow} {place}.
        {beast} lives {place} {time}.
        {time}, {beast} appeared between {plant}.
        {plant} and {plant} {grow} in {region}.
        {view} that {plant} {grow} after {weather}.
        {beast} drank {place}, {link} {beast} watched.
        The {animal} is common in {region}.
        A {animal} sleeps {place} and eats {food}.
        {count} kinds of {plant} {grow} near {city}."""
    ),
    "town": _phrases(
        """The {noun} in {city} opens {time}.
        A {adj} {noun} stands {place}.
        {city} is known for its {food} and its {adj} {noun}.
        The road from {city} to {city} passes the {adj} {noun}.
        {person} sells {food} and {food} {place}.
        The {noun} was built in {year} and painted {colour}.
        Visitors to {city} like the {noun} more than the {noun}.
        A ticket to {city} costs {amount} coins.
        Every {noun} {place} has a {colour} sign."""
    ),
    "science": _phrases(
        """{science} {fact}.
        {view} that {science} {fact}.
        {science} {fact}, {link} {science} {fact}.
        In {year}, {first} {last} showed that {science} {fact}.
        An experiment with {science} took {count} weeks.
        Students learn that {science} {fact}.
        The effect of {science} on {plant} {fact}."""
    ),
    "craft": _phrases(
        """First {craft} {how}, then {craft}.
        {craft} {how}.
        Do not {craft} {time}.
        For the {food}, {craft} and {craft} {how}.
        It takes {amount} minutes to {craft}.
        {first} likes to {craft} {place}.
        If you feel {mood}, {craft} {how}."""
    ),
}
