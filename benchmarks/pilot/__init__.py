"""What the pilot is worth, workload by workload: memory, quality, time, errors, cost."""
