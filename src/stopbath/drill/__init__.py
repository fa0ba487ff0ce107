"""The fault matrix as scenarios, run on the machine of whoever wants to know.

A scenario injects a fault into something real (a program with a worker group, a wrapped command,
a server), verifies that the fault took effect, and compares what is there afterwards with what
was there before. A control, the same with the injection aimed at nothing, must fail to verify.
"""
