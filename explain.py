"""Explains to a person what the cache holds and costs, and what tokens a text is made of."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from show import CONTROL, coloured, columns_of, of, short


def cache_report(session, turns: list[tuple[int, int]], whole: int, reused: int, saved: float) -> Iterator[str]:
    """Lines that explain the cache: ``turns`` are the tokens of each message and its answer, ``whole`` those of the
    conversation with all that the template adds; ``reused`` tokens were not computed again so far, which saved
    ``saved`` seconds."""
    from cache import free_memory

    cache, config = session.cache, session.model.config
    used, reserved, per_token = cache.bytes_used, cache.bytes_reserved, cache.bytes_per_token
    full, empty = "█░" if can_show("█░") else "#."
    width = max(1, min(64, columns_of(sys.stdout) - 1))
    forgotten = f", and {cache.forgotten} forgotten in the middle" if cache.forgotten else ""
    yield f"cache {cache.kind}: {cache.held} of {cache.capacity} tokens{forgotten}"
    if not per_token:
        yield "It keeps nothing: every step computes the whole conversation again."
        return
    here = f"on this rank, one of {session.model.world}: " if session.model.world > 1 else ""
    filled = round(width * used / max(1, reserved))
    yield full * filled + empty * (width - filled)
    free = of(reserved - used, reserved).partition(" of")[0]
    more = short(free_memory(cache.device))
    yield f"{here}{of(used, reserved)} used, {free} reserved and free; {more} more on the device"
    layers, heads, shared = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    yield f"{here}{per_token:,} bytes a token, {per_token // layers:,} in each of {layers} layers"
    if heads > shared:
        mha = per_token * heads // shared
        yield (
            f"{here}{heads} query heads share {shared} of keys and values; "
            f"one for each (MHA) would take {mha:,} bytes a token, {short(mha * cache.capacity)} for this context"
        )
    yield f"reused so far: {reused:,} tokens that were not computed again, which saved {saved:.1f} s"
    yield from _by_turn(turns, full, width - 40)
    if turns:
        yield f"system message and chat template {max(0, whole - sum(map(sum, turns))):>5}"
    if len(session.tokens) > whole:
        yield f"no longer part of it, and held until the next turn {len(session.tokens) - whole:>5}"
    if hasattr(cache, "block_table"):
        yield from _page_map(cache, width)


def _by_turn(turns: list[tuple[int, int]], full: str, width: int) -> Iterator[str]:
    """The last ten turns a line each, and those before in one."""
    rows = [(str(n), you, answer) for n, (you, answer) in enumerate(turns, 1)]
    early, rows = rows[:-10], rows[-10:]
    if early:
        rows.insert(0, (f"1-{len(early)}", sum(row[1] for row in early), sum(row[2] for row in early)))
    most = max((you + answer for _, you, answer in rows), default=1)
    for label, you, answer in rows:
        yield f"turn {label:<5}  you {you:>5}  answer {answer:>5}  {full * round((you + answer) * width / most)}"


def _page_map(cache, width: int) -> Iterator[str]:
    """A sign for each page: of this conversation, shared with another, of another, free."""
    references, own = cache.pool.references, set(cache.block_table)
    mine, both, other, free = "■▣□·" if can_show("■▣□·") else "#%o."
    signs = [free if not n else other if i not in own else mine if n == 1 else both for i, n in enumerate(references)]
    end = max((i + 1 for i, n in enumerate(references) if n), default=0)
    yield f"pages of {cache.pool.page_size} tokens: {mine} own, {both} shared, {other} of another branch, {free} free"
    yield from ("".join(signs[i : min(i + width, end)]) for i in range(0, end, width))
    yield f"and {len(signs) - end} free pages"


def tokens_report(tokenizer, ids: list[int]) -> str:
    """Each token's piece and id, neighbours in other colours."""
    from prompt_toolkit.utils import get_cwidth

    colours, dim, plain = ("\x1b[36m", "\x1b[33m"), "\x1b[2m", "\x1b[0m"
    if not coloured(sys.stdout):
        colours, dim, plain = ("", ""), "", ""
    lines, column, width = [[]], 0, columns_of(sys.stdout)
    for n, token in enumerate(ids):
        piece = tokenizer.piece(token).decode("utf-8", "backslashreplace")
        quoted = f'"{piece}"'.replace("\n", r"\n").replace("\t", r"\t").translate(CONTROL)
        name = quoted if piece else tokenizer.control_name(token)
        column += get_cwidth(f"{name} {token}  ")
        if column > width:
            lines.append([])
            column = get_cwidth(f"{name} {token}  ")
        lines[-1].append(f"{colours[n % 2]}{name}{plain} {dim}{token}{plain}")
    return "\n".join("  ".join(line) for line in lines)


def can_show(text: str) -> bool:
    """Whether stdout's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
