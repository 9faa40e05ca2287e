"""Runs a saved Core ML program in NumPy, for checks where there is no Core ML."""
