"""Plans which cells are measured, what they are fed and must give, and writes the folder."""
