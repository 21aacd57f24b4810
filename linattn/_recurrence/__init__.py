"""Gated and delta recurrences: checks, decays, chunks of tokens, and the walk over them."""
