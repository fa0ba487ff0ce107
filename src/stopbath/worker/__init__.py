"""Ranks: one process per device that holds a model and answers calls."""
