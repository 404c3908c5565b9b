"""Measurements: accuracy of every policy. Each figure in the docs comes from a command of this package."""
