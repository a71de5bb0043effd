"""A conversation: turns in, streamed text out, saved and resumed."""
