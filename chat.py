"""The terminal: arguments, one answer or a conversation, and what is said about the cache and the speed.

    python chat.py                          a conversation
    python chat.py -p "Why is the sky blue?"    one answer, alone on stdout

Nothing here computes. torch and everything that needs it are imported when there is something to run, so that --help
is quick.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

if __name__ == "__main__":  # from here on Ctrl-C ends quietly, also while the rest is imported
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    gc.disable()  # until then: what is imported stays, and to look through it again and again takes 0.2 s

import argparse
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from conversation import ON_FULL, OPTIONS, Conversation, strings
from repl import Repl
from show import (
    CONTROL,
    ENDINGS,
    MODES,
    ChatError,
    JsonOutput,
    MarkdownOutput,
    TextOutput,
    columns_of,
    escapes_work,
    interruptible,
    note,
    one_line,
    reason,
    size,
    stats_for,
    unit_for,
    user_errors,
)

CACHES = ("contiguous", "paged", "int8", "int4", "offload", "window", "none")


# ---- arguments


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line here."""

    def error(self, message: str):
        raise ChatError(f"{message}; --help lists the options")


def count(text: str) -> int:
    """A whole number from 1 on, for argparse, which names the option. Raises ArgumentTypeError or ValueError."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options in ``argv``, None being the command line's. Raises ChatError for one that is unknown or
    malformed."""
    parser = Parser(
        prog="chat.py",
        description="Chat with a LLaMA-architecture model, and see what its KV cache holds.",
        allow_abbrev=False,  # a shortened name that works today would be ambiguous beside tomorrow's options
    )
    add = parser.add_argument
    add("-p", "--prompt", metavar="TEXT", help="answer TEXT once, on stdout; piped stdin is put before it")
    add(
        "--model",
        metavar="DIR",
        help="a Hugging Face model folder; default: SmolLM2-135M-Instruct, fetched at the first run",
    )
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="where to compute (default: auto)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="default: as the weights are stored",
    )
    add(
        "--quantize",
        choices=("none", "int8", "int4"),
        default="none",
        help="pack the weights: half or a third of the bytes, and faster (default: none)",
    )
    add(
        "-c",
        "--ctx-size",
        type=count,
        metavar="N",
        help="most tokens of prompt and answers (default: 4096, or the model's)",
    )
    for name, option in OPTIONS.items():
        flags = ("-n", f"--{name}") if name == "max-tokens" else (f"--{name}",)
        more = "; may be given several times" if option.read is strings else ""
        action = "extend" if more else "store"
        add(*flags, action=action, type=option.read, metavar=option.metavar, help=option.help + more)
    add("--system", metavar="TEXT", help="the system message")
    add("--raw", action="store_true", help="no chat template: the model goes on from the text")
    add(
        "--cache",
        choices=CACHES,
        help="how K and V are kept (default: contiguous); none recomputes all at each step; see --sinks too",
    )
    add("--cache-dir", type=Path, metavar="DIR", help="with --cache offload: keep the cache in a file there")
    add("--draft", metavar="lookup|DIR", help="guess ahead: by what was said, or by a smaller model")
    add("--compile", action="store_true", help="have torch compile the steps, for a GPU; told is what it gains")
    add("--sinks", type=int, metavar="N", help="a chat without end: keep the first N tokens and the recent ones")
    add(
        "--on-full",
        choices=ON_FULL,
        default="stop",
        help="when the context is full: stop, or drop the oldest turns and go on (default: stop)",
    )
    add("--samples", type=count, metavar="N", help="N answers to one prompt, which is computed and held once")
    add("--batch", metavar="FILE", help="answer each line of FILE (- is stdin), a prompt or a JSON object")
    add("-o", "--output", metavar="FILE", help="where --batch writes; what stands there already is gone on with")
    add(
        "--pool",
        type=count,
        metavar="N",
        help="most tokens that all answers of --batch or --samples hold together (default: 4 times --ctx-size)",
    )
    add("--load", metavar="NAME", help="go on with a conversation that was kept; last is the one before")
    add("--interactive", action="store_true", help="talk on after -p")
    add("--vi", action="store_true", help="edit messages with vi's keys")
    add("--markdown", action="store_true", help="show an answer when it is finished, its Markdown rendered")
    add("--stats", choices=MODES, help="what is shown of cache and speed (default: live on a terminal, else summary)")
    add("--json", action="store_true", help="one JSON object per event on stdout")
    add("--verify", action="store_true", help="recompute each step without the cache, and show the largest difference")
    add("--list", action="store_true", help="print the models that are here: in weights/ and in the Hugging Face cache")
    add("--plan", action="store_true", help="print what weights and caches take, from config.json alone")
    add("--world", type=count, metavar="N", help="with --plan: what one of N ranks takes")
    add("--offline", action="store_true", help="never use the network")
    return parser.parse_args(argv)


def prompt_text(args: argparse.Namespace) -> str | None:
    """What to answer once: piped stdin, the text of -p, or both; None when a person sits there. Raises ChatError when
    empty."""
    piped = None
    if sys.stdin is None and args.prompt is None:
        raise ChatError("there is no stdin to read from; give -p TEXT")
    if sys.stdin is not None and not sys.stdin.isatty():
        piped = sys.stdin.buffer.read().decode("utf-8", "replace")
    if args.prompt is None and piped is None:
        return None
    parts = [piped if args.raw or not piped else piped.rstrip("\n"), args.prompt]
    text = "\n\n".join(part for part in parts if part)
    if not text.strip():
        raise ChatError("the prompt is empty")
    return text


def sampling_of(args: argparse.Namespace):
    """The Sampling that the options ask for. Raises ChatError for a value out of range."""
    from generate import Sampling

    given = {option.field: getattr(args, name.replace("-", "_")) for name, option in OPTIONS.items()}
    given = {field: value for field, value in given.items() if value is not None}
    try:
        return Sampling(**given | {"stop": tuple(given.get("stop", ()))})
    except ValueError as error:
        raise ChatError(str(error)) from None


# ---- the engine


def model_folder(name: str | None, offline: bool) -> Path:
    """The folder of a model's name, None being the default one; fetched if need be. Raises GetError."""
    from weights import get

    return get.default_model(offline) if name is None else get.resolve(name, offline)


def device_of(name: str):
    """The torch device that --device names. Raises ChatError when it is not there."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, available in there.items() if available)
    if not there[name]:
        raise ChatError(f"--device {name}: there is none here; --device cpu works everywhere")
    return torch.device(name)


def import_engine() -> None:
    """From here on garbage is collected, and what is imported is not looked through for it. Who calls this may stay:
    an import that fails within another holds its callers' variables."""
    import generate  # noqa: F401
    import tokenizer  # noqa: F401

    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def open_model(args: argparse.Namespace, name: str | None = None):
    """Load the model of a name, or the one that the options name: it, its tokenizer, and the context's length. Raises
    one of ``user_errors``."""
    import parallel
    from model import DTYPES
    from tokenizer import Tokenizer

    import_engine()
    folder, device = model_folder(name or args.model, args.offline), device_of(args.device)
    tokenizer = Tokenizer.from_folder(folder)
    if args.raw:
        tokenizer.strips_first_space = False  # the answer goes on from a text, and does not begin one
    elif not tokenizer.has_template:
        note("this model has no chat template and gets plain User: … Assistant: …; --raw goes on from your text alone")
    llama = parallel.load(folder, device, DTYPES.get(args.dtype), quantize_of(args))
    # By default a modest part of what the model was made for.
    return llama, tokenizer, args.ctx_size or min(4096, llama.config.max_position_embeddings)


def note_long(context: int, config) -> None:
    """Say so if a context is longer than what the model was made for."""
    if context > (most := config.max_position_embeddings):
        note(f"--ctx-size {context} is more than the {most} tokens that the model was made for")


def open_session(args: argparse.Namespace, name: str | None = None):
    """A Session over the model of a name, or the one that the options name. Raises one of ``user_errors``."""
    from generate import Session, VerifyingSession
    from parallel import make

    llama, tokenizer, context = open_model(args, name)
    kind, options = cache_of(args)
    if kind == "sinks" and llama.rotary.kind == "dynamic":
        raise ChatError("--sinks moves tokens to other positions, which this model's dynamic ones do not allow")
    kept = make(kind, llama, context, **options)
    note_long(context, llama.config)
    if kind == "window" and not any(llama.config.windows):
        note("this model has no sliding windows, so that --cache window keeps all, as contiguous does")
    session = (VerifyingSession if args.verify else Session)(llama, kept, tokenizer)
    if args.compile and llama.world > 1:
        raise ChatError("--compile does not go with several ranks")
    if args.compile:
        seconds, before, after = compiled(session)
        kept = "" if after >= before else ", and so not kept"
        note(f"compiled in {seconds:.1f} s: {before:.1f} tok/s before, {after:.1f} after{kept}")
    if args.draft is not None:
        session.drafts = drafts_of(args, session)
    return session


def compiled(session) -> tuple[float, float, float]:
    """``Session.compile``. Raises ChatError where torch finds no compiler."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        return session.compile()
    except BackendCompilerFailed as error:
        reason = str(error.inner_exception).partition("\n")[0]
        raise ChatError(f"--compile: torch cannot ({reason}); it needs a C++ compiler, such as g++") from None


def drafts_of(args: argparse.Namespace, session):
    """What --draft asks for. Raises one of ``user_errors``."""
    import cache
    import model
    from generate import Session
    from speculate import DraftModel, Lookup

    if args.draft == "lookup":
        return Lookup()
    small = model.load(model_folder(args.draft, args.offline), session.model.device)
    ours, theirs = session.model.config.vocab_size, small.config.vocab_size
    if ours != theirs:
        raise ChatError(f"--draft {args.draft}: its vocabulary has {theirs} tokens and the model's {ours}")
    room = cache.make("contiguous", small.config, session.cache.capacity, small.device, small.dtype)
    return DraftModel(Session(small, room, session.tokenizer))


def quantize_of(args: argparse.Namespace) -> str | None:
    return None if args.quantize == "none" else args.quantize


def cache_of(args: argparse.Namespace) -> tuple[str, dict]:
    """The kind of cache that the options ask for, and its own options. Raises ChatError when they do not agree."""
    kind = args.cache or "contiguous"
    if args.cache_dir is not None and kind != "offload":
        raise ChatError(f"--cache-dir is for --cache offload, and this is {kind}")
    if args.sinks is not None:
        if args.cache is not None:
            raise ChatError(f"--sinks is a kind of cache of its own, and cannot be {kind} too")
        return "sinks", {"sinks": args.sinks}
    return kind, {} if args.cache_dir is None else {"folder": args.cache_dir}


def plan(args: argparse.Namespace) -> None:
    """Print what the weights and each kind of cache take, in all or on each of --world ranks, by config.json alone.
    Raises one of ``user_errors``."""
    from cache import KINDS, free_memory
    from model import DTYPES, Config, Llama, arithmetic, name_of, share

    folder, device, world = model_folder(args.model, args.offline), device_of(args.device), args.world or 1
    whole = Config.from_folder(folder)
    config = share(whole, world)
    quantize = quantize_of(args)
    dtype = arithmetic(DTYPES.get(args.dtype), config.dtype, quantize, device)
    most = args.ctx_size or config.max_position_embeddings
    weights = Llama.bytes_for(config, dtype, quantize, world)
    heads = {"MHA": whole.num_attention_heads, "GQA": whole.num_key_value_heads, "MQA": 1}
    own = {1: "MQA", whole.num_attention_heads: "MHA"}.get(whole.num_key_value_heads, "GQA")
    name = str(dtype).removeprefix("torch.")
    lengths = [n for n in (1024 << i for i in range(40)) if n < most] + [most]

    packed = f"{quantize}, computing in " if quantize else ""
    print(f"{name_of(folder)} in {packed}{name}: {config.num_hidden_layers} layers, {heads['MHA']} query heads")
    print(f"over {heads['GQA']} key/value heads ({own}) of {config.head_dim}\n")
    if args.world:
        print(
            f"on each of {world} ranks, with {config.num_attention_heads} and {config.num_key_value_heads} of them:\n"
        )
    print(f"weights                       {size(weights)}")
    costs: dict[tuple[int, ...], list[str]] = {}  # kinds that cost the same stand together
    for kind, cls in KINDS.items():
        costs.setdefault(
            (cls.bytes_each(config, dtype), *(cls.bytes_for(config, n, dtype) for n in lengths)), []
        ).append(kind)
    for (per_token, *totals), kinds in costs.items():
        print(f"\ncache {', '.join(kinds)}" + ("" if per_token else " keeps nothing"))
        if per_token:
            print(f"  per token                   {size(per_token)}")
            for length, total in zip(lengths, totals, strict=True):
                print(f"  {length:>8} tokens             {size(total)}")
    print(f"\nwhat the heads decide, at {most} tokens: this model has {own}")
    for label, count in heads.items():
        if label == "GQA" and own != "GQA":
            continue
        other = share(replace(whole, num_key_value_heads=count), world)
        print(f"  {label}, {count:>3} heads              {size(KINDS['contiguous'].bytes_for(other, most, dtype))}")
    free = free_memory(device) // (world if device.type == "cpu" else 1)  # ranks share a machine, and not a GPU
    made_for = config.max_position_embeddings
    fits = max(0, free - weights) // KINDS["contiguous"].bytes_for(config, 1, dtype)
    each = " each" if args.world else ""
    print(f"\n{f'free on {device.type}{each}':<30}{size(free)}")
    print(f"largest context that fits     {min(fits, made_for)} tokens (made for {made_for}; memory would hold {fits})")


def list_models() -> None:
    """Print each model in weights/ and in the Hugging Face cache, and whether it would load."""
    from model import ModelError, survey
    from tokenizer import Tokenizer, TokenizerError

    folders = model_folders()
    width = min(60, max(map(len, ["model", *folders])))
    print(f"{'model':{width}}  {'type':10}{'parameters':>10}{'weights':>12}{'context':>10}  loads")
    for name, folder in folders.items():
        facts, loads = f"{'':42}", "yes"
        try:
            llama, checkpoint, _ = survey(folder)
            parameters = sum(parameter.numel() for parameter in llama.parameters())
            unit, label = unit_for(stored := sum(path.stat().st_size for path in checkpoint.files))
            kind, context = llama.config.model_type, llama.config.max_position_embeddings
            facts = f"{kind:10}{parameters / 1e6:>8.0f} M{f'{stored / unit:.1f} {label}':>12}{context:>10}"
            Tokenizer.from_folder(folder)
        except (ModelError, TokenizerError) as error:
            loads = f"no: {str(error).replace(str(folder) + '/', '')}"
        print(one_line(f"{name:{width}}  {facts}  {loads}")[:300])


def model_folders() -> dict[str, Path]:
    """Folders by the name that --model takes: those in weights/, and the snapshots in the Hugging Face cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from weights.get import WEIGHTS

    own = sorted(path for path in WEIGHTS.iterdir() if path.is_dir() and not path.name.startswith((".", "_")))
    folders = {os.path.relpath(path): path for path in own}
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return folders
    except (ValueError, OSError) as error:
        note(f"the Hugging Face cache cannot be read: {error}")
        return folders
    for warning in cache.warnings:
        note(str(warning))
    for repository in sorted(cache.repos, key=lambda repository: repository.repo_id):
        revisions = repository.revisions if repository.repo_type == "model" else ()
        for revision in sorted(revisions, key=lambda revision: ("main" not in revision.refs, revision.commit_hash)):
            if (revision.snapshot_path / "config.json").exists():
                main = "main" in revision.refs  # what --model org/name takes
                folders[repository.repo_id + ("" if main else f"@{revision.commit_hash}")] = revision.snapshot_path
    return folders


# ---- many answers


def check_batch(args: argparse.Namespace) -> None:
    """Raises ChatError for options that --batch or --samples leaves without a meaning."""
    given = vars(args)
    names = ("interactive", "load", "markdown", "verify", "draft", "sinks", "cache_dir", "compile")
    for name in (*names, *(["prompt", "samples"] if args.batch else [])):
        if given[name] not in (None, False):
            option = name.replace("_", "-")
            raise ChatError(f"--{option} does not go with --{'batch' if args.batch else 'samples'}")
    if args.cache not in (None, "paged"):
        raise ChatError(f"many answers share pages, and --cache {args.cache} has none; leave it out, or say paged")


def open_batch(args: argparse.Namespace):
    """A Batch over the model that the options name, and what reads its prompts. Raises one of ``user_errors``."""
    from batch import Batch
    from cache import CacheFull
    from lines import Requests
    from parallel import make

    sampling = sampling_of(args)
    llama, tokenizer, context = open_model(args)
    try:
        pool = make("paged", llama, args.pool or 4 * context).pool
    except CacheFull as error:
        raise ChatError(str(error).replace("--ctx-size", "--pool")) from None
    note_long(context, llama.config)
    return Batch(llama, tokenizer, pool, context), Requests(tokenizer, sampling, args.system, args.raw)


def answer_samples(args: argparse.Namespace, text: str) -> int:
    """Print several answers to one prompt, in order, each once it and those before it are there; the exit code."""
    from lines import InOrder, result_of

    batch, requests = open_batch(args)
    try:
        ids, sampling = requests.ask({"prompt": text})
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        batch.add(0, ids, replace(sampling, seed=seed), args.samples)
    except ValueError as error:
        raise ChatError(str(error)) from None

    def write(result: dict) -> None:
        if args.json:
            print(json.dumps(result), flush=True)
            return
        about = f"sample {result['index'] + 1} of {args.samples}, seed {result['seed']}"
        said = "" if args.stats == "off" else f"{about}: {result.get('error') or result['stop']}"
        if said or "error" in result:
            note(said or result["error"])
        answer = result.get("text", "")
        separator = "\n" if result["index"] else ""
        print(separator + (answer.translate(CONTROL) if sys.stdout.isatty() else answer), flush=True)

    output = InOrder(write)
    with interruptible(batch):
        while batch.busy and not batch.interrupted:
            for sequence in batch.step():
                output.put(sequence.index, {**result_of(sequence), "seed": sequence.turn.seed})
    return 130 if batch.interrupted else 0


def answer_file(args: argparse.Namespace) -> int:
    """Answer each line of a file; the exit code."""
    from lines import InOrder, Lines, answer_lines, results

    file = lines_of(args.batch)
    with results(args.output and Path(args.output)) as (write, done):
        batch, requests = open_batch(args)
        output = InOrder(write, done)
        progress = Progress(batch, output, args)
        with interruptible(batch):
            try:
                answer_lines(batch, Lines(file), requests, output, progress.after_step)
            finally:
                progress.clear()
            progress.done()
    return 130 if batch.interrupted else 0


def lines_of(name: str):
    """A file opened to read bytes, - being stdin. Raises ChatError."""
    if name == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise ChatError("--batch - reads piped stdin, and there is none")
        # A file of its own: Python waits at its end for whoever reads sys.stdin.
        return open(os.dup(sys.stdin.fileno()), "rb")
    try:
        return open(name, "rb")
    except OSError as error:
        raise ChatError(f"{name}: {error.strerror}") from None


class Progress:
    """How far a batch is: a line that is written anew, on a terminal that shows nothing else; and one at the end."""

    def __init__(self, batch, output, args: argparse.Namespace):
        self.batch, self.output, self.quiet = batch, output, args.stats == "off"
        self.shown = not self.quiet and escapes_work(sys.stderr) and bool(args.output or not sys.stdout.isatty())
        self.before, self.start, self.last = output.next, perf_counter(), 0.0

    def after_step(self) -> None:
        if self.shown and perf_counter() - self.last > 0.1:
            self.last = perf_counter()
            pool, batch = self.batch.pool, self.batch
            pages = f"{len(pool.references) - pool.free} of {len(pool.references)} pages"
            line = f"{self.output.next} answered, {len(batch.running)} under way, {pages}, {self.speed}"
            print(f"\r{line[: columns_of(sys.stderr) - 1]}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if not self.quiet:
            before = f" after {self.before} that were there" if self.before else ""
            stopped = "; stopped before the end" if self.batch.interrupted else ""
            lines, errors = self.output.next - self.before, self.output.errors
            refused = f" ({errors} with an error)" if errors else ""
            note(f"{lines} lines answered{refused}{before}, {self.speed}{stopped}")

    @property
    def speed(self) -> str:
        seconds = perf_counter() - self.start
        return f"{self.batch.drawn} tokens in {seconds:.1f} s ({self.batch.drawn / seconds:.0f} tok/s)"


# ---- main


def run(argv: list[str] | None) -> int:
    """Do what the arguments ask for; the exit code. Raises ChatError or another of ``user_errors``."""
    args = arguments(argv)
    if args.list:
        list_models()
        return 0
    if args.plan:
        plan(args)
        return 0
    if args.world:
        raise ChatError("--world is for --plan; to run on several ranks, start with torchrun --nproc-per-node N")
    if args.raw and args.system:
        raise ChatError("--system needs the chat template that --raw leaves out")
    if (args.output and not args.batch) or (args.pool and not (args.batch or args.samples)):
        raise ChatError("--output needs --batch" if args.output else "--pool needs --batch or --samples")
    if args.batch or args.samples:
        check_batch(args)
    if args.batch:
        return answer_file(args)
    text = prompt_text(args)
    if args.samples:
        if text is None:
            raise ChatError("--samples needs -p TEXT or piped stdin")
        return answer_samples(args, text)
    talks = text is None or args.interactive
    if talks and args.json:
        raise ChatError("--json needs -p TEXT or piped stdin, and no --interactive")
    if talks and not (sys.stdin and sys.stdin.isatty()):
        read_from_terminal()
    sampling = sampling_of(args)
    import_engine()
    conversation = Conversation(open_session(args), sampling, output_for(args), args.system, args.raw, args.on_full)
    if talks:
        Repl(conversation, lambda name: open_session(args, name), args.vi).run(args.load, text)
        return 0
    if args.load:
        conversation.load(args.load)
        conversation.system = args.system or conversation.system
    conversation.say(text)
    return 130 if conversation.session.last.stop == "interrupt" else 0


def output_for(args: argparse.Namespace):
    """What shows the answers."""
    if args.json:
        return JsonOutput()
    rendered = args.markdown and escapes_work(sys.stdout)
    return (MarkdownOutput if rendered else TextOutput)(stats_for(args.stats))


def read_from_terminal() -> None:
    """Put the terminal in the place of a stdin that was a pipe. Raises ChatError when there is none."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR)
    except OSError:
        raise ChatError("--interactive needs a terminal to read from") from None
    if terminal:  # and not stdin itself, where that was closed
        os.dup2(terminal, 0)
        os.close(terminal)
    sys.stdin = open(0, errors="replace")  # noqa: SIM115


@contextmanager
def orderly_endings() -> Iterator[None]:
    """SIGTERM and SIGHUP leave as an exception does, so that what is to be kept is kept: SystemExit, 128 and the
    number. A closed window sends more than one, and those after the first must not break the keeping."""

    def leave(signum, frame):
        for ending in before:
            signal.signal(ending, signal.SIG_IGN)
        sys.exit(128 + signum)

    before = {signum: signal.signal(signum, leave) for signum in ENDINGS if signal.getsignal(signum) is signal.SIG_DFL}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0; 2 for what the user must mend, after one line on stderr; 130 after Ctrl-C. A closed pipe ends
    quietly. Raises SystemExit after --help, and with 143 or 129 after SIGTERM or SIGHUP."""
    sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # an answer that the terminal cannot encode is shown all the same
    if hasattr(sys.stdin, "reconfigure"):  # it may be None, or of whoever calls this from Python
        sys.stdin.reconfigure(errors="replace")  # and what it cannot decode is taken
    try:
        try:
            with orderly_endings():
                return run(argv)
        finally:
            sys.stdout.flush()  # so that a pipe that is closed shows here, and not when Python ends
    except ChatError as error:
        note(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        closed = isinstance(error, BrokenPipeError)
        if not closed:
            note(reason(error))
        abandon(sys.stdout)
        return 0 if closed else 2
    except Exception as error:
        if not isinstance(error, user_errors()):
            raise
        note(str(error))
        return 2
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # nobody misses what a full stderr does not take
            abandon(sys.stderr)


def abandon(stream) -> None:
    """What could not be written is still held back, and would be tried again when Python ends: it goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    ranks = {"RANK", "WORLD_SIZE"} <= os.environ.keys()  # torchrun's
    if ranks:
        from parallel import run as run_rank
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run_rank(main) if ranks else main())
