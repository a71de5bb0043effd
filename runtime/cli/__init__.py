"""The commands chat, generate, plan and policies, and the terminal."""
