"""``python -m linattn`` is the ``linattn`` command."""

from __future__ import annotations

from linattn.cli import main

if __name__ == "__main__":
    main()
