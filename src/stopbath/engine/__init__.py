"""The engine: from an accepted request to its one final answer."""
