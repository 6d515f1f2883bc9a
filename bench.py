"""Speed and memory, measured side by side in one run.

    python bench.py                          load, prefill and decode of this engine, cached and recomputed
    python bench.py --peers                  transformers beside it, on the same weights, prompts and threads
    python bench.py --caches                 the kinds of cache: bytes, speed, error; a session restored
    python bench.py --batch                  16 answers together and one by one; the pages that 64 sequences waste
    python bench.py --plot docs/steps.png    time per step against position, cached and recomputed
    torchrun --nproc-per-node 3 bench.py --ranks    one model over several processes; what their sums take

Each engine lives in a process of its own, so that load time and memory are its own, and waits while another one is
timed. Rounds are interleaved and medians compared: a machine's speed drifts, and ratios within one run do not.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter

CONTEXT = 8192  # most tokens that are measured


class Cached:
    """This engine; ``kind`` is its cache."""

    kind = "contiguous"

    def __init__(self, folder: str):
        from cache import make
        from model import load

        self.model = load(folder)
        config = self.model.config
        self.vocab_size, capacity = config.vocab_size, min(config.max_position_embeddings, CONTEXT)
        self.cache = make(self.kind, config, capacity, self.model.device, self.model.dtype)
        self.tokens: list[int] = []

    def prefill(self, tokens: list[int]) -> None:
        self.cache.truncate(0)
        self.tokens = list(tokens)
        self.step()

    def step(self) -> None:
        from generate import chunk_size, passes

        for hidden in passes(self.model, self.cache, self.tokens, chunk_size(self.model)):
            last = hidden[-1:]
        self.tokens.append(self.model.head(last).argmax().item())


class Recomputed(Cached):
    """This engine without a cache."""

    kind = "none"


class Transformers:
    """Hugging Face transformers with its default cache, on the same weights in the same dtype."""

    def __init__(self, folder: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self.vocab_size = self.model.config.vocab_size

    def prefill(self, tokens: list[int]) -> None:
        self.cache, self.next = None, [tokens]
        self.step()

    def step(self) -> None:
        import torch

        with torch.inference_mode():
            out = self.model(torch.tensor(self.next), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache, self.next = out.past_key_values, [[out.logits[0, -1].argmax().item()]]


ENGINES = {"cached": Cached, "recomputed": Recomputed, "transformers": Transformers}


def serve(name: str, folder: str) -> None:
    """Be one engine: load, say how long it took, then time what each line of stdin asks for."""
    import torch

    rng = torch.Generator().manual_seed(0)
    start = perf_counter()
    engine = ENGINES[name](folder)
    print(json.dumps({"load_s": perf_counter() - start, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        prompt = torch.randint(engine.vocab_size, (ask["prompt"],), generator=rng).tolist()
        start = perf_counter()
        engine.prefill(prompt)
        prefill, steps = perf_counter() - start, []
        for _ in range(ask["steps"]):
            start = perf_counter()
            engine.step()
            steps.append(perf_counter() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        print(json.dumps({"prefill_s": prefill, "step_s": median(steps) if steps else 0, "peak": peak}), flush=True)


class Engine:
    """A process that runs ``serve``."""

    def __init__(self, name: str, folder: Path):
        command = [sys.executable, __file__, "--serve", name, "--model", str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.load = self._answer()

    def measure(self, prompt: int, steps: int) -> dict:
        """{"prefill_s", "step_s", "peak"} of a prompt of that many tokens and the steps after it."""
        print(json.dumps({"prompt": prompt, "steps": steps}), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict:
        if line := self.process.stdout.readline():
            return json.loads(line)
        sys.exit("bench: an engine stopped; what it said stands above")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def table(names: list[str], folder: Path, rounds: int) -> dict:
    """Measure the engines in turn, ``rounds`` times after a warm-up; medians."""
    engines = {name: Engine(name, folder) for name in names}
    runs: dict[str, list[dict]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            steps = 3 if name == "recomputed" else 24
            short, long = engine.measure(32, steps), engine.measure(512, steps)
            if turn:
                speeds = {"prefill_512": 512 / long["prefill_s"], "decode_32": 1 / short["step_s"]}
                runs[name].append({**speeds, "decode_512": 1 / long["step_s"], "peak_mib": long["peak"] / 2**20})
    result = {}
    for name, engine in engines.items():
        engine.close()
        result[name] = {key: median(run[key] for run in runs[name]) for key in runs[name][0]} | engine.load
    return result


def print_table(result: dict) -> None:
    heads = ("load s", "prefill 512", "decode @32", "decode @512", "peak MiB")
    print("tok/s, medians" + "".join(f"{head:>13}" for head in heads))
    for name, row in result.items():
        speeds = f"{row['prefill_512']:>13.0f}{row['decode_32']:>13.1f}{row['decode_512']:>13.1f}"
        print(f"{name:14}{row['load_s']:>13.2f}{speeds}{row['peak_mib']:>13.0f}")
    ours = result["cached"]
    for name, row in result.items():
        if name != "cached":
            ratios = {key: ours[key] / row[key] for key in ("prefill_512", "decode_32", "decode_512")}
            print(f"cached / {name}: " + ", ".join(f"{key} {ratio:.2f} x" for key, ratio in ratios.items()))


class Silent:
    """A tokenizer for which no token ends an answer, and none is text."""

    stop_ids, strips_first_space = frozenset(), False

    def piece(self, token: int) -> bytes:
        return b""


def together(folder: Path, rounds: int) -> dict[str, float]:
    """Measure 16 answers of 32 tokens, to prompts of 8 to 128, one by one and together: tokens per second, medians of
    interleaved rounds. And what 64 sequences of mixed lengths reserve but do not use, in pages and in one slab each."""
    import torch

    from batch import Batch
    from cache import make
    from generate import Sampling, Session
    from model import load
    from paged import PagedCache, Pool

    model, rng = load(folder), torch.Generator().manual_seed(0)
    config, context = model.config, min(model.config.max_position_embeddings, 2048)
    sampling, runs = Sampling(temperature=0, max_tokens=32), {"one by one": [], "together": []}

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
        start = perf_counter()
        for prompt in asked:
            for _ in session.generate(prompt, sampling):
                pass
        middle, batch = perf_counter(), batch_of(asked)
        while batch.busy:
            batch.step()
        if turn:
            runs["one by one"].append(16 * 32 / (middle - start))
            runs["together"].append(16 * 32 / (perf_counter() - middle))

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


def plot(path: Path, folder: Path, last: int, rounds: int) -> None:
    """Draw the time of one step at several positions, cached and recomputed; medians of interleaved rounds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    positions = [16, *range(last // 8, last + 1, last // 8)]
    figure, axes = plt.subplots(figsize=(7, 4))
    labels = {"recomputed": "recomputed (--cache none)", "cached": "cached (--cache contiguous)"}
    engines = {name: Engine(name, folder) for name in labels}
    times: dict[str, dict[int, list[float]]] = {name: {n: [] for n in positions} for name in engines}
    for _ in range(rounds):
        for n in positions:
            for name, engine in engines.items():
                times[name][n].append(engine.measure(n, 1 if name == "recomputed" else 10)["step_s"] * 1e3)
    for name, engine in engines.items():
        engine.close()
        medians = [median(times[name][n]) for n in positions]
        axes.plot(positions, medians, marker="o", label=labels[name])
        print(name, *(f"{n}: {ms:.1f} ms" for n, ms in zip(positions, medians, strict=True)))
    axes.set(xlabel="tokens before the step", ylabel="ms per step", title=folder.name, ylim=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, bbox_inches="tight")


# ---- the kinds of cache

# When to use which: what the table ends with.
USES = {
    "contiguous": "one conversation: the fastest",
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


def caches(folder: Path, rounds: int, tokens: int) -> dict[str, dict]:
    """What each kind of cache costs, how fast a step after 512 tokens is beside the contiguous kind's, and how far
    the logits on a text of ``tokens`` are from its logits."""
    import torch
    from torch.nn.functional import cross_entropy

    from cache import KINDS, make
    from generate import chunk_size, passes
    from model import Config, load
    from tokenizer import Tokenizer

    model, ids = load(folder), text_ids(Tokenizer.from_folder(folder), tokens)
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
        return perf_counter() - start

    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind, cache in kinds.items():
            cache.truncate(0)
            step(cache, 512)
            steps = [step(cache, n) for n in range(513, 514 if kind == "none" else 545)]
            times[kind] += [median(steps)] if turn else []  # the first round is a warm-up
    target, reference = torch.tensor(ids[1:]), None
    for kind, cache in kinds.items():
        ratios = [a / b for a, b in zip(times["contiguous"], times[kind], strict=True)]
        result[kind] |= {"step_ms": median(times[kind]) * 1e3, "speed": median(ratios)}
        if kind == "none":
            continue
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
    print("| kind | bytes per token | Llama-3.1-8B | speed | logits off by: mean, most | perplexity | when to use it |")
    print("|---|---|---|---|---|---|---|")
    for kind, row in result.items():
        error = f"{row['mean_error']:.3f}, {row['max_error']:.2f}" if row.get("max_error") else "0"
        change = f"{row['change_percent']:+.2f} %" if "change_percent" in row else ""
        sizes = f"{row['bytes_per_token']:,} | {row['bytes_per_token_8b']:,}"
        print(f"| `{kind}` | {sizes} | {row['speed']:.2f} × | {error} | {change} | {row['use']} |")


def restore(folder: Path, tokens: int) -> dict[str, float]:
    """Seconds to prefill a long conversation, to save it, and to restore it from disk."""
    from tempfile import TemporaryDirectory

    from cache import make
    from generate import Sampling, Session
    from model import load
    from tokenizer import Tokenizer

    model, tokenizer = load(folder), Tokenizer.from_folder(folder)
    ids = text_ids(tokenizer, tokens)
    rooms = [make("contiguous", model.config, tokens + 1, model.device, model.dtype) for _ in range(2)]
    sessions = [Session(model, room, tokenizer) for room in rooms]

    def seconds(action) -> float:
        start = perf_counter()
        action()
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


class Part(Cached):
    """One rank's part of this engine, which also counts the seconds that it spends in sums over ranks, waiting for the
    others among them."""

    def __init__(self, folder: Path):
        import torch
        from torch import distributed

        from cache import make
        from parallel import backend, load_part

        distributed.init_process_group(backend())
        self.model = load_part(str(folder), "cuda" if torch.cuda.is_available() else "cpu", None, None)
        self.vocab_size, self.tokens, self.summing_s = self.model.config.vocab_size, [], 0.0
        self.cache = make("contiguous", self.model.config, 1024, self.model.device, self.model.dtype)
        for name in ("all_reduce", "all_gather"):
            setattr(distributed, name, self._timed(getattr(distributed, name)))

    def _timed(self, collective):
        from generate import synchronize

        def call(*args) -> None:
            synchronize(self.model.device)  # what the rank computed before is not part of it
            start = perf_counter()
            collective(*args)
            synchronize(self.model.device)
            self.summing_s += perf_counter() - start

        return call

    def measure(self, work) -> tuple[float, float]:
        """Seconds of ``work``, and those of them that went into sums over ranks."""
        start, before = perf_counter(), self.summing_s
        work()
        return perf_counter() - start, self.summing_s - before


def ranks(folder: Path, rounds: int) -> list[dict[str, float]]:
    """For each rank of torchrun's: prefill of 512 and the steps after it, medians, and the memory that it takes."""
    import torch
    from torch import distributed

    part, prefills, steps = Part(folder), [], []
    prompt = torch.randint(part.vocab_size, (512,), generator=torch.Generator().manual_seed(0)).tolist()
    for _ in range(rounds):
        prefills.append(part.measure(lambda: part.prefill(prompt)))
        steps += [part.measure(part.step) for _ in range(16)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    figures = {
        "weights": sum(parameter.nbytes for parameter in part.model.parameters()),
        "cache": part.cache.bytes_reserved,
        "peak": peak,
        **dict(zip(("prefill_s", "prefill_summing_s"), map(median, zip(*prefills, strict=True)), strict=True)),
        **dict(zip(("step_s", "step_summing_s"), map(median, zip(*steps, strict=True)), strict=True)),
    }
    mine = torch.tensor(list(figures.values()), dtype=torch.float64, device=part.model.device)
    of_all = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(of_all, mine)
    distributed.destroy_process_group()
    return [dict(zip(figures, values.tolist(), strict=True)) for values in of_all]


def print_ranks(result: list[dict[str, float]]) -> None:
    print("rank      weights   cache of 1024   peak memory   prefill tok/s, in sums   decode tok/s, in sums")
    for rank, row in enumerate(result):
        sizes = "".join(f"{row[name] / 2**20:>{width}.1f} MiB" for name, width in zip(SIZES, (9, 12, 10), strict=True))
        prefill = f"{512 / row['prefill_s']:>15.0f} {row['prefill_summing_s'] / row['prefill_s']:>7.0%}"
        decode = f"{1 / row['step_s']:>15.1f} {row['step_summing_s'] / row['step_s']:>7.0%}"
        print(f"{rank:>4}{sizes}{prefill}{decode}")


SIZES = ("weights", "cache", "peak")


def main() -> int:
    """Exit code: 0, or 2 for arguments that cannot be."""
    parser = argparse.ArgumentParser(description="Measure speed and memory, side by side in one run.")
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the default model")
    parser.add_argument("--peers", action="store_true", help="measure transformers too")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each is measured (default: 5)")
    parser.add_argument("--json", action="store_true", help="print the medians as one JSON object")
    parser.add_argument("--batch", action="store_true", help="measure answers together and one by one instead")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time per step against position instead")
    parser.add_argument("--caches", action="store_true", help="compare the kinds of cache instead")
    parser.add_argument("--text", type=int, default=2048, metavar="N", help="tokens of the text they read (2048)")
    parser.add_argument("--restore", type=int, default=8000, metavar="N", help="tokens restored from disk (8000)")
    parser.add_argument("--to", type=int, default=2048, metavar="N", help="last position of the plot (default: 2048)")
    parser.add_argument("--ranks", action="store_true", help="under torchrun: one model over all ranks instead")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1 or args.to < 128:
        parser.error("--rounds must be at least 1 and --to at least 128")
    if args.serve:
        serve(args.serve, str(args.model))
        return 0
    if args.ranks and "RANK" not in os.environ:
        parser.error("--ranks needs torchrun: torchrun --nproc-per-node 2 bench.py --ranks")
    for package, wanted in {"matplotlib": args.plot, "transformers": args.peers}.items():
        if wanted and find_spec(package) is None:
            parser.error(f"{package} is not installed: pip install -r requirements-dev.txt")
    from model import ModelError, survey
    from weights import get

    try:
        folder = args.model or get.default_model()
        most = survey(folder)[0].config.max_position_embeddings
    except (ModelError, get.GetError) as error:
        parser.error(str(error))
    needed = (args.to if args.plot else 128 if args.batch else 512) + 32
    if needed > min(most, CONTEXT):
        parser.error(f"this needs a context of {needed} tokens, and there are {min(most, CONTEXT)}")
    if args.ranks:
        result = ranks(folder, args.rounds)
        if os.environ["RANK"] == "0":
            print(json.dumps(result)) if args.json else print_ranks(result)
        return 0
    if args.plot:
        plot(args.plot, folder, args.to, args.rounds)
        return 0
    if args.caches:
        result, kept = caches(folder, args.rounds, args.text), restore(folder, args.restore)
        if args.json:
            print(json.dumps({"kinds": result, "restored": kept}))
        else:
            print_caches(result)
            took = f"prefilled in {kept['prefill_s']:.2f} s, saved in {kept['save_s']:.2f} s"
            print(f"{kept['tokens']} tokens: {took}, restored in {kept['restore_s']:.2f} s: {kept['ratio']:.0f} x")
        return 0
    if args.batch:
        result = together(folder, args.rounds)
        print(json.dumps(result)) if args.json else print_together(result)
        return 0
    result = table(["cached", "recomputed"] + ["transformers"] * args.peers, folder, args.rounds)
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
