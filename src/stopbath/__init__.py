"""A diffusion server whose workers always stop."""
