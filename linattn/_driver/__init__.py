"""Walks over the blocks of a problem, for every backend: no mathematics of a block is here."""
