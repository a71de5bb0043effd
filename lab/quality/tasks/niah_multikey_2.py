"""Asks as RULER's niah_multikey_2: a magic number in a text of nothing but magic numbers."""

from kvcap.evals.quality.ruler import Needles, string_match_all

MAX_NEW_TOKENS = 128
make = Needles(haystack="needles").make
score = string_match_all
