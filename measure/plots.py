"""Draws two figures: the time of a step, cached against recomputed, and the bytes of caches against the context."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

LABELS = {"contiguous": "cached (--cache contiguous)", "none": "recomputed (--cache none)"}


def refusal(path: Path) -> str | None:
    """Why no figure can be written there, in one line; None if one can."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.is_dir():
        return f"{path} is a folder, and not a file"
    if path.suffix[1:].lower() not in kinds:  # without a suffix, matplotlib would write another file
        return f"{path}: a figure's name ends in one of .{', .'.join(kinds)}"
    if not path.parent.is_dir():
        return f"{path.parent}: no such folder"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{path} cannot be written"
    return None


def draw(path: Path, title: str, times: dict[str, dict[int, float]], sizes: dict[str, dict[int, int]]) -> None:
    """``times``: milliseconds of a step after so many tokens, of each row; ``sizes``: bytes of so many tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for row, curve in times.items():
        left.plot(*zip(*curve.items(), strict=True), marker="o", label=LABELS[row])
    left.set(xlabel="tokens before the step", ylabel="ms per step", title="a step", ylim=0)
    for kind, curve in sizes.items():
        right.plot(curve.keys(), [size / 2**20 for size in curve.values()], label=kind)
    right.set(xlabel="tokens in the cache", ylabel="MiB", title="its cache", ylim=0)
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def cache_sizes(config, last: int) -> dict[str, dict[int, int]]:
    """Bytes of caches of up to ``last`` tokens, as the classes count them: of a model as it is, in 16 bits and fewer,
    and in 16 bits were it MHA or MQA."""
    import torch

    from cache import KINDS

    heads, own = config.num_attention_heads, config.num_key_value_heads
    sharing = {heads: "MHA", own: "GQA", 1: "MQA"} | ({own: "MHA"} if own == heads else {})
    ways = [(f"{name}, {n} KV heads", "contiguous", n) for n, name in sharing.items()]
    ways += [(f"{sharing[own]}, {kind}", kind, own) for kind in ("int8", "int4")]
    positions = range(0, last + 1, max(1, last // 64))
    return {
        label: {n: KINDS[kind].bytes_for(replace(config, num_key_value_heads=kv), n, torch.float16) for n in positions}
        for label, kind, kv in ways
    }
