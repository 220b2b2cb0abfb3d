"""A small network that predicts how often each learned block of a step will run."""
