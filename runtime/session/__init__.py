"""Holds conversations: takes messages, streams answers as text, saves and resumes."""
