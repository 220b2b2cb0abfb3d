"""Losses of the model, one a file, as functions of predictions and ground truth (section 1.9)."""
