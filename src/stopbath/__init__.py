"""A diffusion server whose workers always stop."""

__version__ = "0.1.0"
