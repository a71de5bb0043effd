"""Which cells a plan measures, what they are fed and must give, and the folder that holds it."""
