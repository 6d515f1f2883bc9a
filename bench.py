"""Speed and memory, measured side by side in one run.

    python bench.py                                        this engine: with a cache and without, weights in fewer bits
    python bench.py --peers                                transformers and llama.cpp beside it
    python bench.py --plot docs/steps.png                  draw what a step takes, and what a cache
    python bench.py --synthetic llama-3.1-8b --device cuda  random weights of that shape: nothing is downloaded
    python bench.py --caches                               the kinds of cache: bytes, speed, error; a session restored
    python bench.py --batch                                16 answers together and one by one; what 64 sequences waste
    python bench.py --drafts                               the same answers with prompt lookup and without
    torchrun --nproc-per-node 3 bench.py --ranks           one model over several processes; what their sums take

Each engine lives in a process of its own (measure/). After a warm-up, rounds are interleaved and medians
compared: a machine's speed drifts, and ratios within one run do not. What the machine itself can do is measured in the
same rounds, and figures are given as shares of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple, NoReturn

from measure.compare import LEAST_TEXT, caches, print_caches, print_together, restore, together
from measure.drafts import drafts, print_drafts
from measure.engines import OURS, ROOM, Engine, Stopped, Subject
from measure.peers import LLAMA_CPP, TRANSFORMERS, PeerError, write_gguf
from measure.plots import cache_sizes, draw, refusal
from measure.progress import progress, turn_of
from show import reason, user_errors

HERE = Path(__file__).parent
LOADED = 2**31  # about so many bytes are written to a file and loaded, where weights are random


class Plan(NamedTuple):
    """What is measured on a device: steps after so many tokens, of which prompts up to ``prompt`` are read anew in each
    round; and the rows. On a GPU, they have to fit its memory together."""

    contexts: tuple[int, ...]
    prompt: int
    rows: tuple[str, ...]


PLANS = {
    "cpu": Plan((128, 512, 4096), 512, tuple(OURS)),
    "mps": Plan((128, 512, 4096), 512, tuple(OURS)),
    "cuda": Plan((128, 1024, 4096, 8192, 32768), 8192, ("contiguous", "int8-weights", "int4-weights", "none")),
}


# ---- shapes


def llama3(hidden: int, inner: int, layers: int, heads: int, factor: float, tied: bool) -> dict:
    """The config.json of a Llama 3.1 or 3.2, as published: all have 8 key/value heads, and the same vocabulary."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": hidden // heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": scaling | {"original_max_position_embeddings": 8192},
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


SHAPES = {
    "llama-3.2-1b": llama3(2048, 8192, 16, 32, 32.0, True),
    "llama-3.2-3b": llama3(3072, 8192, 28, 24, 32.0, True),
    "llama-3.1-8b": llama3(4096, 14336, 32, 32, 8.0, False),
    "llama-3.1-70b": llama3(8192, 28672, 80, 64, 8.0, False),
}


def operations(config, tokens: int) -> int:
    """Additions and multiplications of a pass over a prompt: its matrices, the head for one token, and attention, in
    which a token sees half of the others."""
    from model import Llama

    model = Llama(config)
    head = model.lm_head.inputs * model.lm_head.outputs
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * tokens**2
    return 2 * ((model.products_per_token - head) * tokens + head + attention)


# ---- measuring


class Run:
    """Engines side by side, by their rows; one that stops is left out, and why is said on stderr."""

    def __init__(self, subjects: dict[str, Subject], vocab_size: int):
        self.engines: dict[str, Engine] = {}
        for row, subject in subjects.items():
            progress(f"loading: {row}")
            try:
                self.engines[row] = Engine(row, subject)
            except Stopped as reason:
                self._without(row, reason)
        self.vocab_size, self.rng, self.prompts = vocab_size, random.Random(0), {}

    def rounds(self, count: int, contexts: dict[str, list[int]], reread: int) -> dict[str, dict[int, list[dict]]]:
        """What each row answers about steps after each of its contexts, in ``count`` rounds after a warm-up.

        Prompts of up to ``reread`` tokens are read anew in each round. The row ``roof`` knows no contexts.
        """
        answers = {row: {n: [] for n in contexts[row]} for row in contexts if row in self.engines}
        for turn in range(count + 1):
            for row in self.rng.sample(list(answers), len(answers)):  # none always follows the same other one
                try:
                    for n, found in answers[row].items():
                        progress(f"{turn_of(turn, count)}: {row}" + f" after {n} tokens" * (n > 0))
                        answer = self.engines[row].ask(**self._question(row, n, turn == 0 or n <= reread))
                        found += [answer] if turn else []
                except Stopped as reason:
                    self._without(row, reason)
                    del answers[row]
        return answers

    def _question(self, row: str, context: int, anew: bool) -> dict:
        if row == "roof":
            return {}
        if context not in self.prompts:
            self.prompts[context] = [self.rng.randrange(self.vocab_size) for _ in range(context)]
        # Without a cache, each step is a pass over the whole prefix.
        return {"prompt": self.prompts[context], "steps": 1 if row == "none" else 16, "anew": anew}

    def _without(self, row: str, reason: Stopped) -> None:
        progress()
        print(f"bench: {row} is left out: {reason}", file=sys.stderr)
        self.engines.pop(row, None)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def figures(engine: Engine, answers: dict[int, list[dict]], prompt: int, work: int, roof: dict[str, float]) -> dict:
    """One row of the table. ``prompt`` is the length of the prompt that prefill is measured on, and ``work`` its
    operations; a ``share`` is one of what the machine did in the same run."""
    first = min(answers)
    prefill = median(answer["first_s"] for answer in answers[prompt])
    row = {
        "load_s": engine.load_s,
        "load_gb_s": stored_bytes(engine.subject) / engine.load_s / 1e9,
        "first_token_s": median(answer["first_s"] for answer in answers[first]),
        "prefill_tok_s": prompt / prefill,
        "prefill_share": work / prefill / roof["operations"],
        "decode": {},
        "peak_bytes": max(answer["peak"] for found in answers.values() for answer in found),
    }
    for n, found in answers.items():
        step, read = median(answer["step_s"] for answer in found), found[0]["bytes"]
        speed = read / step
        row["decode"][n] = {"step_s": step, "tok_s": 1 / step, "gb_s": speed / 1e9, "share": speed / roof["bandwidth"]}
        if added := read - answers[first][0]["bytes"]:
            longer = median(a["step_s"] - b["step_s"] for a, b in zip(found, answers[first], strict=True))
            row["decode"][n]["longer"] = longer / (added / roof["bandwidth"])
    return row


def stored_bytes(subject: Subject) -> int:
    """Bytes that were read to load it: those of a folder's weights. A GGUF file is mapped, and read with the prompt."""
    from model import Checkpoint

    if subject.weights is None or not Path(subject.weights).is_dir():
        return 0
    return sum(file.stat().st_size for file in Checkpoint(Path(subject.weights)).files)


def beside(rows: list[str]) -> dict[str, str]:
    """Which rows are set against which of ours: those of as many bytes a weight."""
    pairs = {row: LLAMA_CPP[row][1] if row in LLAMA_CPP else "contiguous" for row in rows}
    compared = [row for row in rows if row == "none" or row not in OURS]
    return {row: pairs[row] for row in compared if pairs[row] in rows}


def ratios(ours: dict[int, list[dict]], theirs: dict[int, list[dict]], prompt: int) -> dict:
    """How many times as fast ours is, within each round; medians."""

    def of(key: str, n: int) -> float:
        return median(b[key] / a[key] for a, b in zip(ours[n], theirs[n], strict=True))

    return {"prefill": of("first_s", prompt), "decode": {n: of("step_s", n) for n in theirs}}


def startup(subject: Subject, rounds: int) -> dict[str, float]:
    """Seconds from the start of ``chat.py -p hi`` to its first letter, and what importing torch takes of them."""
    answer = [HERE / "chat.py", "-p", "hi", "--temp", "0", "--device", subject.device, "--model", subject.weights]
    commands = {"first_token_s": answer, "import_torch_s": ["-c", "import torch; print(1)"]}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "bufsize": 0}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds):
        progress(f"starting chat.py: {turn_of(turn + 1, rounds)}")
        for name, command in commands.items():
            start = perf_counter()
            with subprocess.Popen([sys.executable, "-u", *command], **pipes) as process:
                process.stdout.read(1)
                times[name].append(perf_counter() - start)
                process.stdout.read()
    medians = {name: median(taken) for name, taken in times.items()}
    return medians | {"beyond_s": medians["first_token_s"] - medians["import_torch_s"]}


def load_speed(subject: Subject) -> float:
    """GB/s of loading where the weights are random: some layers of the shape are written to a file and loaded."""
    import torch
    from safetensors.torch import save_file

    from model import Config, Llama, sources

    def layers(count: int) -> dict:
        return subject.config | {"num_hidden_layers": count, "vocab_size": 1024, "torch_dtype": "bfloat16"}

    one, two = (Llama.bytes_for(Config.from_json(layers(n)), torch.bfloat16) for n in (1, 2))
    progress("loading: a file of some layers")
    small = layers(min(subject.config["num_hidden_layers"], 1 + max(0, LOADED - one) // (two - one)))
    config = Config.from_json(small)
    parts = [part for name, values in Llama(config).named_parameters() for part in sources(name, values.shape, config)]
    with TemporaryDirectory() as folder:
        tensors = {part.name: torch.zeros(part.shape, dtype=torch.bfloat16) for part in parts}
        save_file(tensors, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(small))
        engine = Engine("contiguous", replace(subject, weights=folder, config=None, dtype=None))
        engine.close()
        return stored_bytes(engine.subject) / engine.load_s / 1e9


def measure(args: argparse.Namespace, subjects: dict[str, Subject], config, plan: Plan) -> dict:
    """The whole run. Raises Stopped when nothing is left to measure."""
    import torch

    from model import DTYPES, name_of

    subject = subjects["roof"]
    started = startup(subject, args.rounds) if subject.config is None else None
    loaded = load_speed(subject) if subject.config is not None else None
    run = Run(subjects, config.vocab_size)
    try:
        asked = {row: [n for n in plan.contexts if row != "none" or n <= plan.prompt] for row in run.engines}
        answers = run.rounds(args.rounds, asked | {"roof": [0]}, plan.prompt)
        if len(answers) < 2 or "roof" not in answers:
            raise Stopped("nothing could be measured")
        roofs, work = answers.pop("roof")[0], operations(config, plan.prompt)
        machine = {key: median(roof[key] for roof in roofs) for key in ("bandwidth", *DTYPES)}
        machine["operations"] = max(machine[name] for name in DTYPES)
        rows = {row: figures(run.engines[row], found, plan.prompt, work, machine) for row, found in answers.items()}
        pairs = beside(list(answers))
        against = {row: {"row": ours} | ratios(answers[ours], answers[row], plan.prompt) for row, ours in pairs.items()}
        result = {"machine": machine, "prompt": plan.prompt, "rows": rows, "ratios": against}
        if args.plot:
            result["steps_ms"] = steps(run, args.to, min(args.rounds, 3))
            result["cache_bytes"] = cache_sizes(config, args.to)
    finally:
        run.close()
    about = {
        "model": args.synthetic or name_of(Path(subject.weights)),
        "dtype": subject.dtype,
        "hardware": hardware(subject.device),
        "threads": subject.threads,
        "compiled": subject.compiled,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "rounds": args.rounds,
    }
    return about | {"startup": started, "load_gb_s": loaded} | result


def steps(run: Run, last: int, rounds: int) -> dict[str, dict[int, float]]:
    """Milliseconds of a step after up to ``last`` tokens, cached and recomputed."""
    positions = [16, *range(last // 8, last + 1, last // 8)]
    answers = run.rounds(rounds, dict.fromkeys(("contiguous", "none"), positions), 0)
    return {
        row: {n: 1e3 * median(answer["step_s"] for answer in found) for n, found in curve.items()}
        for row, curve in answers.items()
    }


def hardware(device: str) -> str:
    """The name of the GPU, or of the processor with the cores that this process may use."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    names = [platform.processor() or platform.machine()]
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")] or names
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0]}, {cores} cores"


# ---- printing


def print_table(result: dict) -> None:
    """The result as Markdown."""
    machine, rows, prompt = result["machine"], result["rows"], result["prompt"]
    contexts = sorted({n for row in rows.values() for n in row["decode"]})
    compiled = ", compiled" if result["compiled"] else ""
    print(f"{result['model']} in {result['dtype']}{compiled}, batch 1; {result['hardware']};")
    when = f"{result['date']}; medians of {result['rounds']} interleaved rounds"
    print(f"torch {result['torch']}, threads: {result['threads']}; {when}.")
    memory, matrices = machine["bandwidth"] / 1e9, machine["operations"] / 1e12
    print(f"The machine: memory {memory:.1f} GB/s, matrices {matrices:.2f} TFLOP/s.")
    if started := result["startup"]:
        parts = f"{started['import_torch_s']:.2f} s import torch and {started['beyond_s']:.2f} s do all else"
        print(f"`chat.py -p hi`: the first letter after {started['first_token_s']:.2f} s, of which {parts}.")
    if result["load_gb_s"]:
        print(f"A file of some layers is loaded at {result['load_gb_s']:.2f} GB/s.")
    heads = ["", "load", f"first token of {contexts[0]}", f"prefill of {prompt}"]
    longer = {name: row["decode"].get(contexts[-1], {}).get("longer") for name, row in rows.items()}
    grows = any(longer.values())  # where there is but one context, nothing does
    heads += [*(f"decode after {n}" for n in contexts), *(["longer steps"] * grows), "peak memory"]
    print("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", sep="\n")
    for name, row in rows.items():
        speed = f", {row['load_gb_s']:.2f} GB/s" if row["load_gb_s"] else ""
        cells = [name, f"{row['load_s']:.2f} s{speed}", f"{row['first_token_s'] * 1e3:.0f} ms"]
        cells += [f"{row['prefill_tok_s']:.0f}, {row['prefill_share']:.0%}"]
        for n in contexts:
            step = row["decode"].get(n)
            cells += [f"{step['tok_s']:.1f}, {step['gb_s']:.1f} GB/s, {step['share']:.0%}" if step else ""]
        cells += [f"{longer[name]:.1f} ×" if longer[name] else ""] * grows + [f"{row['peak_bytes'] / 2**20:,.0f} MiB"]
        print(f"| {' | '.join(cells)} |")
    print("\nSpeeds are tokens per second; shares are of what the machine gave in the same rounds.")
    if grows:
        more = f"what a step after {contexts[-1]} takes more than one after {contexts[0]}"
        print(f"Longer steps: {more}, over what its added bytes would take.")
    for name, ratio in result["ratios"].items():
        decode = ", ".join(f"{times:.2f} × after {n}" for n, times in ratio["decode"].items())
        print(f"{ratio['row']} / {name}: prefill {ratio['prefill']:.2f} ×, decode {decode}")


# ---- the command


class Parser(argparse.ArgumentParser):
    """One that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        progress()
        self.exit(2, f"bench: {message}\n")


RANKS = "torchrun --nproc-per-node 3 bench.py --ranks"  # the default model's heads divide by 3


def at_least(least: int) -> Callable[[str], int]:
    """A type of argparse: numbers from ``least`` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return int(text)

    return number


def parser() -> Parser:
    options = Parser(description="Measure speed and memory, side by side in one run.")
    options.add_argument("--model", type=Path, metavar="DIR", help="default: the default model")
    options.add_argument(
        "--synthetic", metavar="SHAPE", help=f"random weights instead: {', '.join(SHAPES)}, or a config.json"
    )
    options.add_argument("--device", choices=PLANS, default="cpu", help="default: cpu")
    options.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as it is stored")
    options.add_argument(
        "--rounds", type=at_least(1), default=5, metavar="N", help="how often each is measured (default: 5)"
    )
    options.add_argument("--json", action="store_true", help="print the result as one JSON object")

    usual = {device: " ".join(map(str, plan.contexts)) for device, plan in PLANS.items()}
    contexts = f"tokens before a step (default: {usual['cpu']}, on cuda {usual['cuda']}; those that fit the model)"
    table = options.add_argument_group("the table of engines, which is measured unless another is asked for")
    table.add_argument("--peers", action="store_true", help="measure transformers and llama.cpp too")
    table.add_argument("--rows", nargs="+", choices=OURS, metavar="ROW", help=f"which of {', '.join(OURS)}")
    table.add_argument("--contexts", nargs="+", type=at_least(1), metavar="N", help=contexts)
    table.add_argument("--compile", action="store_true", help="have torch compile the steps of this engine")
    table.add_argument("--plot", type=Path, metavar="FILE", help="draw a step's time and a cache's bytes as well")
    table.add_argument(
        "--to", type=at_least(128), default=2048, metavar="N", help="last position of the plot (default: 2048)"
    )

    batch = options.add_argument_group("answers together")
    batch.add_argument("--batch", action="store_true", help="measure 16 answers together and one by one")

    kinds = options.add_argument_group("kinds of cache")
    kinds.add_argument("--caches", action="store_true", help="compare them on a text, and restore a session from disk")
    least = f"at least {LEAST_TEXT}, default: 2048"
    kinds.add_argument(
        "--text", type=at_least(LEAST_TEXT), default=2048, metavar="N", help=f"tokens of the text ({least})"
    )
    kinds.add_argument(
        "--restore", type=at_least(1), default=8000, metavar="N", help="tokens of the session (default: 8000)"
    )

    lookup = options.add_argument_group("drafts")
    lookup.add_argument("--drafts", action="store_true", help="measure the same answers with prompt lookup and without")

    ranks = options.add_argument_group("one model over several processes")
    ranks.add_argument("--ranks", action="store_true", help=f"measure each of them: {RANKS}")
    return options


# Options that have no meaning beside another one, and those that have none without it.
OF_TABLE = ("peers", "rows", "contexts", "compile", "plot")
APART = {
    "batch": ("caches", "drafts", "ranks", *OF_TABLE),
    "caches": ("drafts", "ranks", "synthetic", *OF_TABLE),  # random weights bring no tokenizer to read a text with
    "drafts": ("ranks", "synthetic", *OF_TABLE),
    "ranks": ("synthetic", *OF_TABLE),
    "synthetic": ("model",),
}
NEEDS = {"to": "plot", "text": "caches", "restore": "caches"}


def check(options: Parser, args: argparse.Namespace) -> None:
    """Refuse what cannot be measured as it is asked for, before anything is."""
    given = {name for name, value in vars(args).items() if value != options.get_default(name)}
    for one, others in APART.items():
        for other in others:
            if {one, other} <= given:
                options.error(f"--{one} does not go with --{other}")
    for one, other in NEEDS.items():
        if one in given and other not in given:
            options.error(f"--{one} needs --{other}")
    if args.ranks and "RANK" not in os.environ:
        options.error(f"--ranks needs torchrun: {RANKS}")
    if not args.ranks and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        options.error("torchrun is for --ranks: each of its processes would measure the same")
    if args.plot and args.rows and not {"contiguous", "none"} <= {*args.rows}:
        options.error("--plot needs the rows contiguous and none")
    for package, wanted in {"matplotlib": args.plot, "transformers": args.peers}.items():
        if wanted and find_spec(package) is None:
            options.error(f"{package} is not installed: pip install -r requirements-dev.txt")
    if args.plot and (why := refusal(args.plot)):
        options.error(f"--plot {why}")


def subject_of(args: argparse.Namespace):
    """The Subject that the options name, and its Config. Raises ModelError, GetError and ValueError."""
    import torch

    from model import Config, read_json, survey
    from weights import get

    if args.device != "cpu" and not getattr(torch, args.device).is_available():
        raise ValueError(f"--device {args.device}: there is none here")
    weights = raw = None
    if args.synthetic:
        raw = SHAPES.get(args.synthetic) or read_json(Path(args.synthetic))
        config = Config.from_json(raw)
        stored = config.dtype or torch.bfloat16
    else:
        weights = (args.model or get.default_model()).resolve()
        model, checkpoint, _ = survey(weights)
        config, stored = model.config, checkpoint.dtype("model.embed_tokens.weight")
    dtype = args.dtype or str(stored).removeprefix("torch.")
    weights = None if weights is None else str(weights)
    return Subject(weights, raw, args.device, dtype, torch.get_num_threads(), args.compile), config


def plan_of(args: argparse.Namespace, config) -> Plan:
    """What the options ask for, or what the device's plan has that fits the model. Raises ValueError."""
    usual, most = PLANS[args.device], config.max_position_embeddings - ROOM
    contexts = args.contexts or [n for n in usual.contexts if n <= most] or usual.contexts[:1]
    needed = max(*contexts, args.to if args.plot else 0)
    if needed > most:
        raise ValueError(f"this needs a context of {needed + ROOM} tokens, and there are {most + ROOM}")
    prompt = max((n for n in contexts if n <= usual.prompt), default=min(contexts))
    return Plan(tuple(sorted(contexts)), prompt, tuple(args.rows or usual.rows))


def peers_of(subject: Subject, work: Path) -> dict[str, Subject]:
    """The other engines, with the files that llama.cpp reads in ``work``; what cannot be compared is said on stderr."""
    others = dict.fromkeys(TRANSFORMERS, subject)
    why = None
    if find_spec("llama_cpp") is None:
        why = "it is not installed: pip install llama-cpp-python"
    elif subject.weights is None or subject.device != "cpu":
        why = "it is measured on a model folder, on a CPU"
    try:
        for row, (kind, _) in LLAMA_CPP.items() if why is None else ():
            progress(f"writing: {row}")
            path, kinds = work / f"{row}.gguf", {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
            write_gguf(Path(subject.weights), path, kind or kinds[subject.dtype])
            others[row] = replace(subject, weights=str(path))
    except PeerError as error:
        why = error
    if why:
        progress()
        print(f"bench: llama.cpp is left out: {why}", file=sys.stderr)
    return others


def measured(args: argparse.Namespace) -> tuple[dict | list, Callable[[dict | list], None]]:
    """What the options ask for, and what prints it. Raises Stopped, ValueError and ``user_errors``."""
    subject, config = subject_of(args)
    if args.ranks:
        from measure.ranks import print_ranks, ranks

        return ranks(subject, args.rounds), print_ranks
    if args.batch:
        return together(subject, args.rounds), print_together
    if args.caches:
        result = {"kinds": caches(subject, args.rounds, args.text), "restored": restore(subject, args.restore)}
        return result, print_caches
    if args.drafts:
        return drafts(subject, args.rounds), print_drafts
    plan = plan_of(args, config)
    with TemporaryDirectory() as work:
        subjects = dict.fromkeys(("roof", *plan.rows), subject)
        subjects |= peers_of(subject, Path(work)) if args.peers else {}
        return measure(args, subjects, config, plan), print_table


def main() -> int:
    """Exit code: 0, or 2 for what cannot be measured."""
    options = parser()
    args = options.parse_args()
    check(options, args)
    from cache import CacheFull  # and torch, which takes seconds

    try:
        result, print_result = measured(args)
    except CacheFull as error:
        options.error(str(error).partition(";")[0])  # what would fit is told in options of chat.py
    except (*user_errors(), ValueError, Stopped) as error:
        options.error(str(error))
    finally:
        progress()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result)) if args.json else print_result(result)
    if args.plot:
        title = f"{result['model']} in {result['dtype']}; {result['hardware']}"
        try:
            draw(args.plot, title, result["steps_ms"], result["cache_bytes"])
        except OSError as error:
            options.error(reason(error, str(args.plot)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
