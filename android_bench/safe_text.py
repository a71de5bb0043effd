"""Makes text from files, devices and clients safe to print.

`plain` is for terminals, charts and messages; `escaped` is for Markdown, and for HTML made from it.
"""

from __future__ import annotations

import re

UNSHOWN = "\N{REPLACEMENT CHARACTER}"
LONGEST = 300  # characters of one name or sentence that are printed
ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
# Characters of HTML, code, emphasis, links and tables; an underscore within a word is harmless.
INLINE = re.compile(r"[\\`*~|\[\]<>&]|(?<![^\W_])_|_(?![^\W_])")
LEADING = re.compile(r"^(?:[#+=-](?=[\s#+=-]|$)|\d+(?=[.)](?:\s|$)))")  # a heading, a list, a rule


def plain(text: object, longest: int = LONGEST) -> str:
    r"""Return a text on one line, without characters that move a cursor, hide or reverse text.

    >>> plain("A\n# B \x1b[31m")
    'A # B �[31m'
    """
    line = " ".join(str(text)[: 4 * longest].split())[:longest]
    return "".join(letter if letter.isprintable() else UNSHOWN for letter in line)


def escaped(text: object, longest: int = LONGEST) -> str:
    r"""Return a text that Markdown renders as it is, in any place of a document.

    >>> escaped("<b>A | B_1*</b>")
    '&lt;b&gt;A \\| B_1\\*&lt;/b&gt;'
    """
    line = INLINE.sub(lambda match: ENTITIES.get(match[0], f"\\{match[0]}"), plain(text, longest))
    if begins := LEADING.match(line):
        at = begins.end() - (not begins[0].isdigit())
        line = f"{line[:at]}\\{line[at:]}"
    return line
