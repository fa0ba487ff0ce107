"""Models: diffusers pipelines, and the small one that ships in the package."""
