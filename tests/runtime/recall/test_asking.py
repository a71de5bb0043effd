"""Messages that ask bring the passage they ask for; messages that only tell bring nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvcap.runtime.recall.recall import Recall
from kvcap.runtime.types import KeptTokens

MESSAGES = [
    "My sister Paula lives in Porto. She works as a nurse at the children's hospital. Our cat is "
    "called Biscuit, and the vet said that he must not eat more than 60 g of dry food a day.",
    "The code of the wine cellar is 8841. The wifi password of the cabin is plum-river-92.",
    "Invoice 4711 is due on 3 May, and invoice 4712 on 9 June. Both go to Halvorsen & Sons.",
    "Dr. Okafor is the dentist of Mr. Lund. His practice is in Mill Lane, above the bakery.",
    "The backup of the database runs on host kestrel at 02:30. Its log is written to "
    "/var/log/backup/nightly.log, and the identifier of the volume is "
    "3f2b8c1e-7a40-4d55-9e0c-2b6d8f1a9c07.",
    "Here is the first part of the story. The old fisherman lived by the harbour, in a house with "
    "a red door. Every morning he mended his nets, and every evening he looked for the lighthouse "
    "beyond the bay. In winter the ferry did not run, and the island had no doctor. One night the "
    "keeper of the lighthouse fell ill. The fisherman took his boat and rowed through the storm. "
    "He found the keeper beside the lamp, which had gone out. He lit it again, and three ships "
    "came home safely. The captain of the largest gave him a silver watch.",
    "1. Definitions. 'License' shall mean the terms and conditions for use, reproduction, and "
    "distribution. 'Licensor' shall mean the copyright owner. 'Source' form shall mean the "
    "preferred form for making modifications. 2. Grant of Copyright License. Subject to the terms "
    "of this License, each Contributor hereby grants to You a perpetual, worldwide, royalty-free "
    "copyright license to reproduce, prepare derivative works of, and distribute the Work.",
    "```python\ndef total(prices, tax):\n    subtotal = sum(prices)\n    return subtotal * (1 + "
    "tax)\n\ndef main():\n    print(total([3, 4], 0.25))\n```",
    "| day | train | platform |\n| Monday | 07:45 to Bergen | 4 |\n| Tuesday | 09:10 to Oslo | 2 "
    "|\n| Friday | 16:20 to Trondheim | 7 |\n",
    "Anna's boat was painted green last summer. Her brother Tom wants to sail it to Shetland in "
    "August. The mooring costs 340 euros a year.",
    "For the soup take two leeks, three potatoes and a litre of stock. Simmer it for 25 minutes. "
    "Season it with nutmeg. It serves four.",
    "The meeting with the landlord moved to Thursday at 10:15. Bring the tenancy agreement and "
    "the photographs of the damp wall.",
]
QUESTIONS = {  # each with what is in the passage that it asks for
    # questions with their mark
    "Where does my sister Paula live?": "Porto",
    "What is our cat called?": "Biscuit",
    "How much dry food may the cat eat?": "60 g",
    "When is invoice 4711 due?": "3 May",
    "Who is the dentist of Mr. Lund?": "Okafor",
    "I am at the cabin now. What was the wifi password?": "plum-river-92",
    "On which host does the backup run, and where is its log?": "kestrel",
    "What did the captain give the fisherman?": "silver watch",
    "Which platform does the train to Trondheim leave from?": "16:20",
    "According to the licence, what shall 'Licensor' mean?": "copyright owner",
    "How long must the soup simmer?": "25 minutes",
    # imperatives
    "Tell me the code of the wine cellar.": "8841",
    "Remind me what colour Anna's boat was painted.": "green",
    "Give me the identifier of the volume, please.": "3f2b8c1e-7a40-4d55-9e0c-2b6d8f1a9c07",
    "Show me the function total once more.": "def total",
    "Please repeat what the mooring costs.": "340 euros",
    "Write a short mail to my sister Paula at the hospital": "nurse",
    "list the ingredients of the soup": "two leeks",
    "Explain what the function total does with the tax.": "def total",
    "Thanks. Now look up when the meeting with the landlord is.": "10:15",
    # requests without a question mark
    "what is the wifi password of the cabin": "plum-river-92",
    "who is Mr. Lund's dentist": "Okafor",
    "I forgot when invoice 4712 is due.": "9 June",
    "I need the code of the wine cellar again.": "8841",
    "I'd like to know where Tom wants to sail.": "Shetland",
    "can you say which train goes to Oslo": "09:10",
    "wine cellar code": "8841",
    "wifi password cabin": "plum-river-92",
}
PLAIN = [
    # what goes on with a text that was read before
    "The second part of the story. In spring the fisherman sailed to the island once more. The "
    "keeper of the lighthouse was well again, and they ate together by the lamp. The ferry came on "
    "the first of April, with a doctor on board. The people of the harbour danced all night.",
    "'Who goes there?' cried the keeper. 'Only I,' said the fisherman. 'Will you open the door?' "
    "The keeper lifted the lamp, and they went in from the storm.",
    "3. Grant of Patent License. Subject to the terms and conditions of this License, each "
    "Contributor hereby grants to You a perpetual, worldwide, non-exclusive patent license to "
    "make, use, sell, and import the Work, where such license applies only to those claims that "
    "are necessarily infringed by their Contribution.",
    "4. Redistribution. You may reproduce and distribute copies of the Work or Derivative Works in "
    "any medium, with or without modifications, provided that You give any other recipients of "
    "the Work a copy of this License.",
    "What follows is the appendix of the license, which is the same in every copy of the Work.",
    # facts that are told about what was named before
    "My sister Paula is coming to visit us next week.",
    "Biscuit was at the vet yesterday, he is fine.",
    "The code of the garage is 5520.",
    "Invoice 4713 is due on 2 July, please remember it.",
    "The dentist was very friendly today.",
    "Anna's boat is for sale now, since Tom bought a larger one.",
    "When the meeting with the landlord is over, we will paint the damp wall.",
    # code, tables, lists, logs
    "```python\ndef total(prices, tax, discount=0):\n    subtotal = sum(prices) - discount\n    "
    "return subtotal * (1 + tax)\n\ndef main():\n    print(total([3, 4, 5], 0.25, 1))\n```",
    "const url = base + '?page=' + page;\nconst total = prices ? sum(prices) : 0;\nreturn total;",
    "Shopping list:\n- leeks\n- potatoes\n- stock\n- dry food for the cat\n- nutmeg\n- bread",
    "| day | train | platform |\n| Saturday | 08:05 to Bergen | 3 |\n| Sunday | 11:40 to Oslo | 1|",
    "2026-04-02 02:30:01 INFO backup of database started on host kestrel\n2026-04-02 02:41:17 INFO "
    "backup written to volume\n2026-04-02 02:41:18 INFO done",
    "To bake the bread, mix the flour with water and salt. Let it rest for an hour. Give the dough "
    "a fold every 20 minutes. Bake it until the crust is brown.",
    # small talk
    "Thank you, that is all for today.",
    "Good morning! The weather is lovely here.",
    "Ok, that sounds good.",
    "I see, that was quite a storm.",
    # mail and notes
    "Dear Mr. Lund, thank you for your letter. We received the photographs and the agreement, and "
    "shall answer within ten days. Kind regards, Halvorsen & Sons",
    "Notes of the meeting: the landlord will have the wall repaired in May. The tenancy agreement "
    "stays as it is. The next meeting is on a Thursday, too.",
]
NEEDLESS, ANSWERED = 0.1, 0.9  # shares: at most, at least
NOTHING = [KeptTokens(0, True, [np.zeros(0, int)])]


@pytest.fixture(scope="module")
def recalled(tokenizer):
    """Return a function that says which texts a message brings after `MESSAGES` was evicted."""

    def encode(text):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    messages = [
        {"role": role, "content": text}
        for message in MESSAGES
        for role, text in (("user", message), ("assistant", "I see."))
    ]
    ids = encode(tokenizer.apply_chat_template(messages, tokenize=False) + "<|user|>")
    recall = Recall(tokenizer, encode, 512)

    def brought(message):
        tokens = encode(message)
        start = recall.question_start(tokens, 0, len(tokens))
        recall.read_again(tokens[start:], ids + tokens[:start], NOTHING, len(ids) + start)
        text = "\n".join(one.text for one in recall.passages)
        recall.clear()
        return text

    return brought


def test_questions_and_requests_bring_what_they_ask_for(recalled):
    missed = [
        question for question, answer in QUESTIONS.items() if answer not in recalled(question)
    ]
    assert len(missed) <= (1 - ANSWERED) * len(QUESTIONS), missed


def test_plain_text_brings_nothing(recalled):
    needless = {text: brought for text in PLAIN if (brought := recalled(text))}
    assert len(needless) <= NEEDLESS * len(PLAIN), needless
