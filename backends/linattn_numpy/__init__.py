"""NumPy backend of linattn."""
