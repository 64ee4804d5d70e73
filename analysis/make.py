"""Rebuild every committed figure from the committed rows: one command, no GPU.

    python -m analysis.make                  # analysis/results/*.jsonl -> name.png, name.pdf, name.md beside them
    python -m analysis.make --results DIR

Invariant: the same rows give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import load, report

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when there are no rows yet, 2 and one line on standard error for rows that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m analysis.make", description="Rebuild the figures of all committed rows.")
    parser.add_argument(
        "--results", metavar="DIR", type=Path, default=RESULTS, help="folder of *.jsonl (default: analysis/results)"
    )
    folder: Path = parser.parse_args(arguments).results
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        print(f"{folder}: no *.jsonl yet, so no figure to build; put measured rows there")
        return 0
    try:
        for file in files:
            for path in report.write(load.load(file), folder, file.stem):
                print(path)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
