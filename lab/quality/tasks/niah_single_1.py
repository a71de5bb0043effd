"""Asks as RULER's niah_single_1: a magic number in noise."""

from kvcap.evals.quality.ruler import Needles, string_match_all

MAX_NEW_TOKENS = 128
make = Needles(haystack="noise").make
score = string_match_all
