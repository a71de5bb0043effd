"""Triton twins of scores, and the choice between twin and eager.

None exists yet: every score runs eagerly.
"""
