"""Checkpoints of drafters: configs and their keys, layouts, files read strictly and written whole."""
