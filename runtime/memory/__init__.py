"""What a process may still take, and what holds it to a cap."""
