"""`python -m crosswire.analyzer JSON` runs the job that its argument describes."""

from __future__ import annotations

from crosswire.analyzer.job import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
