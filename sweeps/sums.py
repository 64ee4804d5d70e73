"""Writes questions and answers of arithmetic, a text at hand on which exact match means something.

    python -m sweeps.sums PATH.jsonl          # {"question": "What is 47 + 85?", "answer": "132"}

Invariant: the same number of lines gives the same bytes; no question comes twice, not even with its
two numbers exchanged.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from sweeps.command_line import Parser, count, mend_streams

SUMS, PRODUCTS = range(10, 1000), range(2, 200)
"""The numbers that are added, and those that are multiplied."""
NUM_LINES, MOST = 20_000, 30_000


def examples(num_lines: int) -> list[dict[str, str]]:
    """Sums and products in turn."""
    drawn, seen = random.Random(0), set()
    found: list[dict[str, str]] = []
    while len(found) < num_lines:
        adds = len(found) % 2 == 0
        one, other = drawn.choices(SUMS if adds else PRODUCTS, k=2)
        if (key := (adds, min(one, other), max(one, other))) not in seen:
            seen.add(key)
            question = f"What is {one} {'+' if adds else 'x'} {other}?"
            found.append(
                {"question": question, "answer": str(one + other if adds else one * other)}
            )
    return found


def write(path: Path, num_lines: int = NUM_LINES) -> None:
    """The file whole, one JSON object a line."""
    lines = [json.dumps(example) + "\n" for example in examples(num_lines)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(lines))
    partial.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2, after one line, where the path or the number is at fault."""
    mend_streams()
    parser = Parser(prog="python -m sweeps.sums", description="Write questions of arithmetic.")
    parser.add_argument("path", type=Path, metavar="PATH.jsonl")
    parser.add_argument("--lines", type=count(1, MOST), default=NUM_LINES, metavar="N")
    options = parser.parse_args(arguments)
    try:
        write(options.path, options.lines)
    except OSError as error:
        why = f"got {error.strerror}, allowed a file that can be written; choose another path"
        print(f"{options.path}: {why}", file=sys.stderr)
        return 2
    print(options.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
