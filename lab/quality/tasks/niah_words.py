"""Hides a magic word, such as 'blue-door', in prose: RULER's needle with words as values."""

from kvcap.evals.quality.ruler import Needles, string_match_all

MAX_NEW_TOKENS = 128
make = Needles(values="word").make
score = string_match_all
