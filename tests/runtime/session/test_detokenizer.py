"""Text from tokens as they come: what the tokenizer decodes, also where bytes are no letters."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_tokenizers import BYTES, MADE, SPECIAL, Wrapped
from toy_engine import ToyEngine, session_of

from kvcap.runtime.session.detokenizer import Detokenizer, byte_tokens

KNOWN = {name: make() for name, make in MADE.items()}
OWN = "@"  # stands for a broken run
ODD = [BYTES[byte] for byte in (0x0A, 0x41, 0x80, 0x82, 0xA9, 0xAC, 0xC3, 0xE2, 0xF0, 0x9F, 0xFF)]


def expected(tokenizer, names: list[str], *, special: bool = False) -> str:
    """The tokenizer's own decoding, but for runs of bytes that are no text: those as in Python."""
    ids = [tokenizer.token_to_id(name) for name in names]
    runs, pieces, of_bytes = list[bytes](), list[str](), byte_tokens(tokenizer)
    for name, token in zip(names, ids, strict=True):
        if token in of_bytes or name == OWN:
            if pieces[-1:] != [OWN]:
                pieces.append(OWN)
                runs.append(b"")
            runs[-1] += of_bytes.get(token, OWN.encode())
        elif special or name not in SPECIAL:
            pieces.append(name)
    texts = [run.decode("utf-8", "replace") for run in runs]
    if not any("\ufffd" in text for text in texts):
        return str(tokenizer.decode(ids, not special))
    text = tokenizer.decode([tokenizer.token_to_id(x) for x in pieces], not special)
    each = iter(texts)
    return re.sub(OWN, lambda _: next(each), text)


def streamed(
    tokenizer, names: list[str], before: Sequence[str] = (), *, special: bool = False
) -> list[str]:
    read = [tokenizer.token_to_id(name) for name in before]
    text = Detokenizer(Wrapped(tokenizer), read, special=special)
    pieces = [text.put(tokenizer.token_to_id(name)) for name in names]
    return [*pieces, text.end()]


def test_broken_bytes_become_a_replacement_letter():
    """Of `é`, a byte that begins a letter, and `H`: tokenizers' own stream raises here."""
    for kind in ("gemma", "llama"):
        pieces = streamed(KNOWN[kind], ["<0xC3>", "<0xA9>", "<0xE2>", "H", "<0xE2>", "<0x82>"])
        assert pieces == ["", "é", "", "\ufffdH", "", "", "\ufffd"]
    pieces = streamed(KNOWN["byte-level"], ["Ã©", "â", "H", "âĤ"])
    assert pieces == ["é", "", "\ufffdH", "", "\ufffd"]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", KNOWN)
@given(data=st.data())
def test_pieces_are_the_tokenizers_own_text(kind, special, data):
    """Of any tokens in any order: letters, broken ones, special tokens."""
    tokenizer = KNOWN[kind]
    names = sorted(set(tokenizer.get_vocab()) - {"<0x20>"})  # a space has a token of its own
    often = [name for name in (*SPECIAL, *ODD, "▁", "▁a", "Ã", "©", "Ġ") if name in names]
    drawn = data.draw(st.lists(st.sampled_from(names) | st.sampled_from(often), max_size=24))
    text = "".join(streamed(tokenizer, drawn, special=special))
    assert text == expected(tokenizer, drawn, special=special)
    read = [*data.draw(st.lists(st.sampled_from(names), max_size=9)), "a"]
    read += data.draw(st.lists(st.sampled_from(SPECIAL), max_size=6))
    text = "".join(streamed(tokenizer, drawn, read, special=special))
    whole = expected(tokenizer, [*read, *drawn], special=special)
    assert expected(tokenizer, read, special=special) + text == whole


@given(
    data=st.lists(st.binary(max_size=3) | st.sampled_from([b"a", b" ", "é€🙂".encode()])).map(
        b"".join
    )
)
@example(data=b"\xc3\xa9\xe2H")
def test_any_bytes_are_read_as_python_reads_them(data):
    """By tokenizers of both kinds, and whole letters are given with their last token."""
    names = [BYTES[byte] if byte > 0x7E else chr(byte) for byte in data]
    gemma = KNOWN["gemma"]
    names = [x if x in gemma.get_vocab() else f"<0x{ord(x):02X}>" for x in names]
    letters = KNOWN["byte-level"]
    text = data.decode("utf-8", "replace")
    assert "".join(streamed(gemma, names)) == text
    level = Detokenizer(Wrapped(letters))
    pieces = [level.put(token) for token in letters_of(letters, data)]
    assert "".join([*pieces, level.end()]) == text
    if "\ufffd" not in text:
        assert level.end() == streamed(gemma, names)[-1] == ""


def letters_of(tokenizer, data: bytes) -> list[int]:
    """The token of every byte, of a byte-level tokenizer."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    names = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [tokenizer.token_to_id(names[byte]) for byte in data]


@pytest.mark.parametrize("kind", ["gemma", "llama", "byte-level"])
def test_a_conversation_goes_on_behind_broken_bytes(kind):
    """Tokens drawn at random, as of a hot model."""
    session = session_of(ToyEngine(64, tokenizer=Wrapped(KNOWN[kind])))
    session.set_generation(max_new_tokens=300, temperature=9.0, seed=1, logprobs=0)
    text = "".join(session.complete("a"))
    names = [KNOWN[kind].id_to_token(one.token) for one in session.logprobs]
    assert len(names) == session.turn.completion_tokens == 300
    assert text == expected(KNOWN[kind], names)
    assert "\ufffd" in text
    assert "".join(session.complete("a"))


def test_the_first_space_of_an_answer_is_kept():
    """Also behind special tokens; not where a text begins, or it is not known what is before."""
    names = ["▁Pa", "r", "▁", "▁a"]
    for kind in ("llama", "metaspace"):
        for read in (["▁", "a"], ["▁a", "<s>", "</s>", "<s>", "</s>", "<s>"], ["<0x41>"]):
            assert streamed(KNOWN[kind], names, read) == [" Pa", "r", " ", " a", ""]
        for read in ([], ["<s>"]):
            assert streamed(KNOWN[kind], names, read) == ["Pa", "r", " ", " a", ""]
    ids = [KNOWN["llama"].token_to_id(name) for name in names]
    text = Detokenizer(Wrapped(KNOWN["llama"]), [-1, ids[0], -1])
    assert text.begins
    assert text.put(ids[0]) == "Pa"
    assert not text.begins


@pytest.mark.parametrize("kind", ["gemma", "llama", "byte-level"])
def test_prompt_and_answer_are_the_text_of_all_tokens(kind):
    """Of several texts that follow each other; with the texts of log probabilities."""
    session = session_of(ToyEngine(200, tokenizer=Wrapped(KNOWN[kind])))
    session.set_generation(max_new_tokens=99, logprobs=0)
    turns = [
        ("The capital:", " Pa+r"), ("  it is", "[a-z]"), ("\nb", "    a = 1"), ("b", "( [a-z]){3}"),
        (" ", " a"),
    ]  # fmt: skip
    written = ""
    for prompt, regex in turns:
        session.set_generation(regex=regex)
        answer = "".join(session.complete(prompt))
        assert re.fullmatch(regex, answer)
        assert "".join(one.text for one in session.logprobs) == answer
        assert b"".join(one.bytes for one in session.logprobs) == answer.encode()
        written += prompt + answer
        assert KNOWN[kind].decode([*session.read_ids, *session._unread]) == written
    begun = session_of(ToyEngine(64, tokenizer=Wrapped(KNOWN[kind])))
    begun.set_generation(max_new_tokens=9, logprobs=0, temperature=9.0, seed=3)
    answer = "".join(begun.complete("<s>"))  # which is no text, so that the answer begins it
    assert "".join(one.text for one in begun.logprobs if one.text not in SPECIAL) == answer


def test_the_text_before_a_call_is_kept():
    """Where the answer begins with a space."""
    session = session_of(ToyEngine(64, tokenizer=Wrapped(KNOWN["llama"])))
    call = r" Wait\. \[TOOL_CALLS\] \[\{\"name\":\"a\",\"arguments\":\{\}\}\]"
    session.set_generation(max_new_tokens=99, regex=call)
    assert "".join(session.complete("Q:")).startswith(" Wait. [")
    assert session.parsed.content == "Wait."
    assert [call.name for call in session.parsed.tool_calls] == ["a"]
