"""Executors: run calls in the ranks of one replica."""
