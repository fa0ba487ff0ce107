"""A rank: loads the model, answers calls, cancels between steps."""
