"""Pipelines: diffusers checkpoints, run as they are or shared by the ranks of a replica."""
