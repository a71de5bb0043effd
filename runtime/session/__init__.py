"""Conversations: messages in, streamed text out, saved and resumed."""
