"""The numbers of docs/numbers.md: `make bench`, or `python -m benchmarks [NAME …]`."""
