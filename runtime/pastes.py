"""Long texts in the prompt, each one character that is shown as `[pasted 120 lines]`."""

from __future__ import annotations

from bisect import bisect_right

from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments

LINES, CHARACTERS = 5, 500  # from so many on, a text is long
FIRST = 0xF0000  # of the characters that stand for texts: in a plane for private use


class Pastes(Processor):
    """The long texts of one prompt, by the characters that stand for them."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def fold(self, text: str) -> str:
        """`text`, or the character that stands for it if it is long."""
        if text.count("\n") + 1 < LINES and len(text) < CHARACTERS:
            return text
        code = FIRST + len(self._texts)
        self._texts[code] = text
        return chr(code)

    def unfold(self, typed: str) -> str:
        """What was typed, with the long texts in it."""
        return typed.translate(self._texts)

    def folded(self, typed: str) -> bool:
        """Whether a long text is in what was typed."""
        return any(ord(character) in self._texts for character in typed)

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        """Show labels in place of the characters."""
        shown: StyleAndTextTuples = []
        starts, column = [], 0  # where each character of the line is shown
        for style, character, *_ in explode_text_fragments(transformation_input.fragments):
            starts.append(column)
            text = self._texts.get(ord(character))
            shown.append((style, character) if text is None else (f"{style} italic", label(text)))
            column += len(shown[-1][1])

        def display(source: int) -> int:
            return starts[source] if source < len(starts) else column + source - len(starts)

        def source(display: int) -> int:
            if display >= column:
                return len(starts) + display - column
            return max(0, bisect_right(starts, display) - 1)

        return Transformation(shown, source_to_display=display, display_to_source=source)


def label(text: str) -> str:
    """What stands in the prompt for `text`."""
    lines = text.count("\n") + 1
    return f"[pasted {lines:,} lines]" if lines > 1 else f"[pasted {len(text):,} characters]"
