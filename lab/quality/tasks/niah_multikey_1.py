"""Asks as RULER's niah_multikey_1: a magic number in prose, and those of three other keys."""

from kvcap.evals.quality.ruler import Needles, string_match_all

MAX_NEW_TOKENS = 128
make = Needles(others=3).make
score = string_match_all
