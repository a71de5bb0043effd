"""Asks as RULER's niah_single_2: a magic number in prose. OBCache's passkey is this (C.1)."""

from kvcap.evals.quality.ruler import Needles, string_match_all

MAX_NEW_TOKENS = 128
make = Needles().make
score = string_match_all
