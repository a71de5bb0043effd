"""Asks as RULER's niah_multiquery: the magic numbers of four keys, in prose."""

from kvcap.evals.quality.ruler import Needles, string_match_all

MAX_NEW_TOKENS = 128
PLACED = False  # answers are spread over the text
make = Needles(queried=4).make
score = string_match_all
