"""Runs a language model's chat in fixed memory: cache, attention, plan, session, backends, chat."""
