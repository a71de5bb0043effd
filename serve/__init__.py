"""A server that answers many conversations under one cap of memory, by OpenAI's API."""
