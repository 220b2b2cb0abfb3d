"""Loops with a data-dependent trip count that can be differentiated in reverse mode."""
