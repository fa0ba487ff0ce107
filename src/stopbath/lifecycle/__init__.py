"""Worker groups that always stop: spawn, ready, watch, stop, report. Standard library only."""
