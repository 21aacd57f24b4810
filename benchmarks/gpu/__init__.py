"""linattn on a GPU: is it right, does it behave as promised, how far is it from the limit.

    python -m benchmarks.gpu.first_contact [--seconds S] [--few]
    python -m benchmarks.gpu.run [--out FILE] [--quick] [--only SECTION ...] [--seconds S]

The first compares results with formulas, and takes at most five minutes. Runs of the second add to
the file what it does not hold yet:
``--only ceilings parity``, ``--only timings peers`` and ``--only behaviour`` are made to take less
than ten minutes each, where a run of everything takes longer.

Runs from a checkout, installed or not, and needs numpy, cupy, array-api-compat and ml_dtypes;
torch and flash-linear-attention are measured where they are installed. A section runs in a separate
process, so that a kernel that breaks the device, or never ends, costs one item and not the run;
every item is saved as it is done.
"""
