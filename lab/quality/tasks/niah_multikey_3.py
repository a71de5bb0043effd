"""Asks as RULER's niah_multikey_3: the magic UUID of a UUID in a text of nothing but such."""

from kvcap.evals.quality.ruler import Needles, string_match_all

MAX_NEW_TOKENS = 128
make = Needles(keys="uuid", values="uuid", haystack="needles").make
score = string_match_all
