"""How much memory a process may still take, and the guard that holds it to a cap."""
