"""Finds evicted text that a message asks about, so that it can be read again in front of it.

Above the cache, which knows nothing of it: text that is read again are tokens like any others,
pinned until the answer is written.
"""
