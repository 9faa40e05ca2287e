"""Core ML packages: the program, its weights, and an evaluator that runs it in NumPy."""
