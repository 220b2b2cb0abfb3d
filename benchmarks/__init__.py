"""Scripts that print what the documentation claims; `python -m benchmarks.table` runs them all."""
