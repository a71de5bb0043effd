"""Asks as RULER's niah_single_3: a magic UUID in prose."""

from kvcap.evals.quality.ruler import Needles, string_match_all

MAX_NEW_TOKENS = 128
make = Needles(values="uuid").make
score = string_match_all
