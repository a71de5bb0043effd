"""Plans which cells are measured, with their inputs and expected outputs, and writes the folder."""
