"""Defines the commands chat, generate, plan and policies, and the chat in a terminal."""
