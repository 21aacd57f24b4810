"""linattn on a GPU: is it right, and how long does it take.

    python -m benchmarks.gpu.first_contact [--seconds S] [--out FILE] [--random SEED] [WORD ...]
    python -m benchmarks.gpu.times [--seconds S] [--out FILE] [WORD ...]

Both run from a checkout, installed or not, and need numpy, cupy, array-api-compat and ml_dtypes.
"""
