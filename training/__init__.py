"""Training of the bundled digit model; not part of the installed package."""
