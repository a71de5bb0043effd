"""Memory meters and the pytest plugin."""
