"""Serves many conversations under one cap of memory, by OpenAI's API."""
