"""Makes text from files, devices and clients safe to show.

`plain` is for terminals, charts and messages; `escaped` for Markdown, and so for HTML made of it.
"""

from __future__ import annotations

import re

UNSHOWN = "\N{REPLACEMENT CHARACTER}"
LONGEST = 300  # characters of one name or sentence that are shown
ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
# Anywhere: HTML, code, emphasis, links, a table's bars. An underscore within a word is only one.
INLINE = re.compile(r"[\\`*~|\[\]<>&]|(?<![^\W_])_|_(?![^\W_])")
LEADING = re.compile(r"^(?:[#+=-](?=[\s#+=-]|$)|\d+(?=[.)](?:\s|$)))")  # a heading, a list, a rule


def plain(text: object, longest: int = LONGEST) -> str:
    r"""Write words on one line, without characters that move a cursor, hide, or turn what follows.

    >>> plain("A\n# B \x1b[31m")
    'A # B �[31m'
    """
    line = " ".join(str(text)[: 4 * longest].split())[:longest]
    return "".join(letter if letter.isprintable() else UNSHOWN for letter in line)


def escaped(text: object, longest: int = LONGEST) -> str:
    r"""Write words so that Markdown shows them as they are, wherever they stand.

    >>> escaped("<b>A | B_1*</b>")
    '&lt;b&gt;A \\| B_1\\*&lt;/b&gt;'
    """
    line = INLINE.sub(lambda found: ENTITIES.get(found[0], f"\\{found[0]}"), plain(text, longest))
    if begins := LEADING.match(line):
        at = begins.end() - (not begins[0].isdigit())
        line = f"{line[:at]}\\{line[at:]}"
    return line
