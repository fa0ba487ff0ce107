"""What is on this host: our runs, other model servers' processes, and what the host gives.

Looks and reports; signals nothing. `ps`, `sweep` and `doctor` show what is found here.
"""
