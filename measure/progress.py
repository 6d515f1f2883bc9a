"""How far a run is: a line on stderr, where a terminal shows it."""

from __future__ import annotations

import sys

from show import columns_of, escapes_work


def progress(line: str = "") -> None:
    """Write ``line`` over the one before it; an empty one takes that away."""
    if escapes_work(sys.stderr):
        print(f"\r{line[: columns_of(sys.stderr) - 1]}\x1b[K", end="", file=sys.stderr, flush=True)


def turn_of(turn: int, rounds: int) -> str:
    """The name of a round; before the first one comes a warm-up."""
    return f"round {turn} of {rounds}" if turn else "warm-up"
