"""Asks as RULER's niah_multivalue: all four magic numbers of one key, in prose."""

from kvcap.evals.quality.ruler import Needles, string_match_all

MAX_NEW_TOKENS = 128
PLACED = False  # answers are spread over the text
make = Needles(each=4).make
score = string_match_all
