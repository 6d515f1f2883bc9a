"""What the table of bench.py has no room for: the kinds of cache, a session restored, answers many at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

from measure.engines import Silent, Subject
from measure.progress import progress, turn_of

# ---- the kinds of cache

AFTER, LEAST_TEXT = 512, 512 + 32  # steps after so many tokens of the text are timed, up to its least length

# When to use which: what the table ends with.
USES = {
    "contiguous": "one conversation: the simplest",
    "paged": "branches, samples, batches: what they share is held once",
    "int8": "twice the context in the same memory",
    "int4": "three times the context in the same memory",
    "offload": "a cache larger than the device, or, in a file, than the memory",
    "window": "models with sliding windows: holds the window alone",
    "sinks": "chats without end: the middle is forgotten",
    "none": "to see what a cache is for",
}


def text_ids(tokenizer, count: int) -> list[int]:
    """The first tokens of an English text that every Python brings: parts of its language reference."""
    from pydoc_data.topics import topics

    longest = sorted(topics.values(), key=len, reverse=True)
    return tokenizer.encode("\n".join(longest[:8]))[:count]


def read_through(model, cache, ids: list[int]):
    """logits [T - 1, vocab_size] of each token of a text but the last, 16 tokens a pass, so that nearly all of what
    each one reads is in the cache, as in an answer."""
    import torch

    from generate import passes

    return torch.cat([model.head(hidden) for hidden in passes(model, cache, ids[:-1], 16)])


def caches(subject: Subject, rounds: int, tokens: int) -> dict[str, dict]:
    """What each kind of cache costs, how fast a step after ``AFTER`` tokens is beside the contiguous kind's, and how
    far the logits on a text of ``tokens`` are from its logits."""
    import torch
    from torch.nn.functional import cross_entropy

    from cache import KINDS, make
    from generate import chunk_size, passes, synchronize
    from model import Config
    from tokenizer import Tokenizer

    model, ids = subject.model(), text_ids(Tokenizer.from_folder(subject.weights), tokens)
    llama_8b = Config(128256, 4096, 14336, 32, 32, 8)
    kinds = {kind: make(kind, model.config, tokens, model.device, model.dtype) for kind in USES}
    result = {
        kind: {
            "bytes_per_token": cache.bytes_per_token,
            "bytes_per_token_8b": KINDS[kind].bytes_each(llama_8b, torch.bfloat16),
            "use": USES[kind],
        }
        for kind, cache in kinds.items()
    }

    def step(cache, n: int) -> float:
        start = perf_counter()
        for _ in passes(model, cache, ids[:n], chunk_size(model)):
            pass
        synchronize(model.device)
        return perf_counter() - start

    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind, cache in kinds.items():
            progress(f"{turn_of(turn, rounds)}: {kind}")
            cache.truncate(0)
            step(cache, AFTER)
            last = AFTER + 1 if kind == "none" else LEAST_TEXT
            steps = [step(cache, n) for n in range(AFTER + 1, last + 1)]
            times[kind] += [median(steps)] if turn else []  # the first round is a warm-up
    target, reference = torch.tensor(ids[1:], device=model.device), None
    for kind, cache in kinds.items():
        ratios = [a / b for a, b in zip(times["contiguous"], times[kind], strict=True)]
        result[kind] |= {"step_ms": median(times[kind]) * 1e3, "speed": median(ratios)}
        if kind == "none":
            continue
        progress(f"{kind} reads {len(ids)} tokens")
        cache.truncate(0)
        logits = read_through(model, cache, ids)
        loss = cross_entropy(logits, target)
        if reference is None:
            reference = logits, loss
        off = (logits - reference[0]).abs()
        perplexity = {"perplexity": loss.exp().item(), "change_percent": 100 * (loss - reference[1]).expm1().item()}
        result[kind] |= {"mean_error": off.mean().item(), "max_error": off.max().item(), **perplexity}
    return result


def print_caches(result: dict[str, dict]) -> None:
    kinds, restored = result["kinds"], result["restored"]
    print("| kind | bytes per token | Llama-3.1-8B | speed | logits off by: mean, most | perplexity | when to use it |")
    print("|---|---|---|---|---|---|---|")
    for kind, row in kinds.items():
        error = f"{row['mean_error']:.3f}, {row['max_error']:.2f}" if row.get("max_error") else "0"
        change = f"{row['change_percent']:+.2f} %" if "change_percent" in row else ""
        sizes = f"{row['bytes_per_token']:,} | {row['bytes_per_token_8b']:,}"
        print(f"| `{kind}` | {sizes} | {row['speed']:.2f} × | {error} | {change} | {row['use']} |")
    took = f"prefilled in {restored['prefill_s']:.2f} s, saved in {restored['save_s']:.2f} s"
    back = f"restored in {restored['restore_s']:.2f} s: {restored['ratio']:.0f} x"
    print(f"{restored['tokens']} tokens: {took}, {back}")


def restore(subject: Subject, tokens: int) -> dict[str, float]:
    """Seconds to prefill a long conversation, to save it, and to restore it from disk."""
    from tempfile import TemporaryDirectory

    from cache import make
    from generate import Sampling, Session, synchronize
    from tokenizer import Tokenizer

    progress(f"{tokens} tokens, saved and restored")
    model, tokenizer = subject.model(), Tokenizer.from_folder(subject.weights)
    ids = text_ids(tokenizer, tokens)
    rooms = [make("contiguous", model.config, tokens + 1, model.device, model.dtype) for _ in range(2)]
    sessions = [Session(model, room, tokenizer) for room in rooms]

    def seconds(action) -> float:
        start = perf_counter()
        action()
        synchronize(model.device)
        return perf_counter() - start

    with TemporaryDirectory() as place:
        path = Path(place) / "session"
        result = {
            "tokens": len(ids),
            "prefill_s": seconds(lambda: list(sessions[0].generate(ids, Sampling(max_tokens=1)))),
            "save_s": seconds(lambda: sessions[0].save(path)),
            "restore_s": seconds(lambda: sessions[1].load(path)),
        }
    return result | {"ratio": result["prefill_s"] / result["restore_s"]}


# ---- many answers

ANSWER = 128  # tokens


def together(subject: Subject, rounds: int) -> dict[str, float]:
    """Measure 16 answers of 128 tokens, to prompts of 8 to 128, one by one and together: tokens per second, medians of
    interleaved rounds. And what 64 sequences of mixed lengths reserve but do not use, in pages and in one slab each."""
    import torch

    from batch import Batch
    from cache import make
    from generate import Sampling, Session
    from paged import PagedCache, Pool

    model, rng = subject.model(), torch.Generator().manual_seed(0)
    config, context = model.config, min(model.config.max_position_embeddings, 2048)
    sampling, runs = Sampling(temperature=0, max_tokens=ANSWER), {"one by one": [], "together": []}

    def prompts(count: int) -> list[list[int]]:
        lengths = [8 + 120 * i // (count - 1) for i in range(count)]
        return [torch.randint(config.vocab_size, (length,), generator=rng).tolist() for length in lengths]

    def batch_of(asked: list[list[int]]) -> Batch:
        batch = Batch(model, Silent(), Pool(config, 16 * len(asked), model.device, model.dtype), context)
        for i, prompt in enumerate(asked):
            batch.add(i, prompt, sampling)
        return batch

    session = Session(model, make("contiguous", config, context, model.device, model.dtype), Silent())
    for turn in range(rounds + 1):
        asked = prompts(16 if turn else 2)  # first a warm-up
        progress(f"{turn_of(turn, rounds)}: one by one")
        start = perf_counter()
        for prompt in asked:
            for _ in session.generate(prompt, sampling):
                pass
        middle = perf_counter()
        progress(f"{turn_of(turn, rounds)}: together")
        batch = batch_of(asked)
        while batch.busy:
            batch.step()
        if turn:
            runs["one by one"].append(16 * ANSWER / (middle - start))
            runs["together"].append(16 * ANSWER / (perf_counter() - middle))

    # What is reserved does not depend on the layers, so one is enough.
    one = replace(config, num_hidden_layers=1, windows=(None,), rotary=(True,))
    pool = Pool(one, 64 * context // 16, "cpu", model.dtype)
    lengths = torch.randint(1, context + 1, (64,), generator=rng).tolist()
    for length in lengths:
        PagedCache(one, context, "cpu", model.dtype, pool).extend(length)
    reserved = (len(pool.references) - pool.free) * pool.page_size
    wasted = {"wasted in pages": reserved - sum(lengths), "in slabs": 64 * context - sum(lengths)}
    return {name: median(speeds) for name, speeds in runs.items()} | wasted


def print_together(result: dict[str, float]) -> None:
    alone, speed, waste, slabs = result.values()
    print(f"16 answers one by one {alone:.1f} tok/s, together {speed:.1f} tok/s: {speed / alone:.2f} x")
    print(f"64 sequences waste {waste} tokens in pages, {slabs} in slabs: {100 * waste / slabs:.2f} %")
