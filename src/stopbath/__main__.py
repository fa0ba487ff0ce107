"""`python -m stopbath` is the console script."""

from stopbath.cli import main

main()
