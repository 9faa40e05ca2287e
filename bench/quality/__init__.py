"""Variants trained small and ranked by perplexity."""
