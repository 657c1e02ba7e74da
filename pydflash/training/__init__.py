"""Training of drafters: data, objective, loop."""
