"""Rebuild every committed figure from the committed rows and timelines: one command, no GPU.

    python -m analysis.make                  # analysis/results/*.jsonl -> name.png, name.pdf, name.md beside them,
                                             # *.timeline.json -> name.timeline.png, name.timeline.pdf
    python -m analysis.make --results DIR

Invariant: the same files give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import load, report
from analysis.figures import timeline
from analysis.timeline import SUFFIX

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when there are no rows yet, 2 and one line on standard error for rows that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m analysis.make", description="Rebuild the figures of all committed results.")
    parser.add_argument(
        "--results", metavar="DIR", type=Path, default=RESULTS, help=f"folder of *.jsonl, *{SUFFIX} (default: analysis/results)"
    )
    folder: Path = parser.parse_args(arguments).results
    files, timelines = sorted(folder.glob("*.jsonl")), sorted(folder.glob(f"*{SUFFIX}"))
    if not files and not timelines:
        print(f"{folder}: no *.jsonl or *{SUFFIX} yet, so no figure to build; put measured rows there")
        return 0
    try:
        for file in files:
            for path in report.write(load.load(file), folder, file.stem):
                print(path)
        for path in timeline.write(timelines):
            print(path)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
