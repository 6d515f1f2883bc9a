"""The terminal: arguments, one answer or a conversation, and what is said about the cache and the speed.

    python chat.py                          a conversation
    python chat.py -p "Why is the sky blue?"    one answer, alone on stdout

Nothing here computes. torch and everything that needs it are imported when there is something to run, so that --help
is quick.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

STATS = ("off", "summary", "live", "step")
CACHES = ("contiguous", "none")


class ChatError(Exception):
    """Something that the user must mend, in one line."""


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
        "-c",
        "--ctx-size",
        type=count,
        metavar="N",
        help="most tokens of prompt and answers (default: 4096, or the model's)",
    )
    add("-n", "--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: what the context leaves)")
    add("--temp", type=float, metavar="X", help="temperature; 0 is greedy (default: 0.7)")
    add("--top-k", type=int, metavar="N", help="only the N likeliest tokens (default: 0, all)")
    add("--top-p", type=float, metavar="X", help="only the likeliest tokens that make up X together (default: 1, all)")
    add(
        "--min-p",
        type=float,
        metavar="X",
        help="only tokens at least X times as likely as the likeliest (default: 0, all)",
    )
    add("--repeat-penalty", type=float, metavar="X", help="make tokens that stood before less likely (default: 1, not)")
    add("--seed", type=int, metavar="N", help="the same seed gives the same answer (default: a new one each time)")
    add("--system", metavar="TEXT", help="the system message")
    add("--stop", action="append", metavar="STR", help="end the answer before STR; may be given several times")
    add("--raw", action="store_true", help="no chat template: the model goes on from the text")
    add(
        "--cache",
        choices=CACHES,
        default="contiguous",
        help="none recomputes everything at each step (default: contiguous)",
    )
    add("--stats", choices=STATS, help="what is shown of cache and speed (default: live on a terminal, else summary)")
    add("--json", action="store_true", help="one JSON object per event on stdout")
    add("--verify", action="store_true", help="recompute each step without the cache, and show the largest difference")
    add("--list", action="store_true", help="print the models that are here: in weights/ and in the Hugging Face cache")
    add("--plan", action="store_true", help="print what weights and caches take, from config.json alone")
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

    names = {"temp": "temperature", "stop": "stop"}
    options = ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens", "stop")
    given = {names.get(name, name): getattr(args, name) for name in options if getattr(args, name) is not None}
    try:
        return Sampling(**{**given, "stop": tuple(given.get("stop", ()))})
    except ValueError as error:
        raise ChatError(str(error)) from None


# ---- the engine


def model_folder(args: argparse.Namespace) -> Path:
    """The folder that --model names, or the default one; fetched if need be. Raises GetError."""
    from weights import get

    return get.default_model(args.offline) if args.model is None else get.resolve(args.model, args.offline)


def device_of(name: str):
    """The torch device that --device names. Raises ChatError when it is not there."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, available in there.items() if available)
    if not there[name]:
        raise ChatError(f"--device {name}: there is none here; --device cpu works everywhere")
    return torch.device(name)


def open_session(args: argparse.Namespace):
    """Load what the options name, and return the Session over it. Raises one of ``user_errors``."""
    import cache
    import model
    from generate import Session, VerifyingSession
    from tokenizer import Tokenizer

    folder, device = model_folder(args), device_of(args.device)
    tokenizer = Tokenizer.from_folder(folder)
    llama = model.load(folder, device, None if args.dtype == "auto" else model.DTYPES[args.dtype])
    most = llama.config.max_position_embeddings
    context = args.ctx_size or min(4096, most)  # a modest part of what the model was made for
    kept = cache.make(args.cache, llama.config, context, device, llama.dtype)
    session = (VerifyingSession if args.verify else Session)(llama, kept, tokenizer)
    if context > most:
        note(f"--ctx-size {context} is more than the {most} tokens that the model was made for")
    return session


def plan(args: argparse.Namespace) -> None:
    """Print what the weights and each kind of cache take, by config.json alone. Raises one of ``user_errors``."""
    from cache import KINDS, free_memory
    from model import DTYPES, Config, Llama, name_of

    folder, device = model_folder(args), device_of(args.device)
    config = Config.from_folder(folder)
    dtype = DTYPES.get(args.dtype) or config.dtype or DTYPES["float32"]
    most = args.ctx_size or config.max_position_embeddings
    weights = Llama.bytes_for(config, dtype)
    heads = {"MHA": config.num_attention_heads, "GQA": config.num_key_value_heads, "MQA": 1}
    own = {1: "MQA", config.num_attention_heads: "MHA"}.get(config.num_key_value_heads, "GQA")
    name = str(dtype).removeprefix("torch.")
    lengths = [n for n in (1024 << i for i in range(40)) if n < most] + [most]

    print(f"{name_of(folder)} in {name}: {config.num_hidden_layers} layers, {heads['MHA']} query heads")
    print(f"over {heads['GQA']} key/value heads ({own}) of {config.head_dim}\n")
    print(f"weights                       {size(weights)}")
    for kind, cls in KINDS.items():
        if not cls.bytes_for(config, 1, dtype):
            print(f"\ncache {kind} keeps nothing")
            continue
        print(f"\ncache {kind}")
        print(f"  per token                   {size(cls.bytes_for(config, 1, dtype))}")
        for length in lengths:
            print(f"  {length:>8} tokens             {size(cls.bytes_for(config, length, dtype))}")
    print(f"\nwhat the heads decide, at {most} tokens: this model has {own}")
    for label, count in heads.items():
        if label == "GQA" and own != "GQA":
            continue
        other = replace(config, num_key_value_heads=count)
        print(f"  {label}, {count:>3} heads              {size(KINDS['contiguous'].bytes_for(other, most, dtype))}")
    free = free_memory(device)
    fits = max(0, free - weights) // KINDS["contiguous"].bytes_for(config, 1, dtype)
    print(f"\nfree on {device.type:<8}              {size(free)}")
    print(f"largest context that fits     {fits} tokens (the model was made for {config.max_position_embeddings})")


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


def size(count: int) -> str:
    """Bytes for people and for scripts: rounded, then exact."""
    unit, name = unit_for(count)
    return f"{f'{count / unit:.4g} {name}':>10}  {count} bytes"


def unit_for(count: int) -> tuple[int, str]:
    """The largest unit that ``count`` bytes fill at least once."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return 2 ** (10 * power), ("B", "KiB", "MiB", "GiB", "TiB")[power]


# ---- output

# Control characters in a model's text could move the cursor, rename the window or worse; a terminal gets their names
# instead.
CONTROL = {code: f"\\x{code:02x}" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


def note(text: str) -> None:
    """One line to the person, never to stdout."""
    with suppress(OSError):  # there is no better place to say that stderr is full or gone
        print(f"chat: {one_line(' '.join(text.split()))}", file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """Text from a file, or a folder's name, as a terminal may show it."""
    return text.replace("\n", " ").translate(CONTROL)


def escapes_work(stream) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def of(used: int, reserved: int) -> str:
    unit, name = unit_for(reserved)
    return f"{used / unit:.1f} of {reserved / unit:.1f} {name}"


class Stats:
    """Says nothing of cache and speed; the base of those that do. Each answer has its own."""

    def __init__(self):
        coloured = escapes_work(sys.stderr) and not os.environ.get("NO_COLOR")
        self.dim, self.plain = ("\x1b[2m", "\x1b[0m") if coloured else ("", "")

    @property
    def keeps_text(self) -> bool:
        """Whether the text is shown at the end of the answer, and not as it comes."""
        return False

    def say(self, line: str) -> None:
        if sys.stderr.isatty():
            line = textwrap.fill(line, os.get_terminal_size(sys.stderr.fileno()).columns or 80)
        print(f"{self.dim}{line.translate(CONTROL)}{self.plain}", file=sys.stderr, flush=True)

    def before_text(self) -> None:
        """Called before a step's text is written."""

    def after_text(self, session, step) -> None:
        """Called after a step's text was written."""

    def done(self, session) -> None:
        """Called at the end of an answer."""


class Summary(Stats):
    """One line after each answer."""

    def done(self, session) -> None:
        turn, cache = session.last, session.cache
        held = f"{cache.length}/{cache.capacity} tokens, {of(cache.bytes_used, cache.bytes_reserved)}"
        speed = f"{turn.decode_tok_s:.1f} tok/s, {turn.decode_bytes_s / 1e9:.1f} GB/s"
        self.say(
            f"[prompt {turn.computed_tokens} new at {turn.prefill_tok_s:.0f} tok/s + {turn.reused_tokens} reused | "
            f"answer {turn.generated_tokens} at {speed} | cache {cache.kind} {held} | {turn.stop} | seed {turn.seed}]"
        )


class EachStep(Summary):
    """A line for each step, with its text."""

    def __init__(self):
        super().__init__()
        self.count = 0

    @property
    def keeps_text(self) -> bool:
        return sys.stdout.isatty() and sys.stderr.isatty()  # where it would stand between the lines

    def after_text(self, session, step) -> None:
        self.count += 1
        cache = session.cache
        held = (
            f"{step.cache_tokens:>5}/{cache.capacity} tokens {step.cache_bytes:>11,} of {cache.bytes_reserved:,} bytes"
        )
        rate = f"{session.last.decode_tok_s:6.1f} tok/s" if session.last.decode_passes else "   (prefill)"
        speed = f"{step.seconds * 1e3:7.1f} ms {rate}{verified(step)}"
        text = json.dumps(step.text, ensure_ascii=False)
        self.say(f"{self.count:>4} {held} {speed}  {step.token:>6} {text}")


class Live(Summary):
    """A line below the text, written anew at each step."""

    def __init__(self):
        super().__init__()
        self.column = 0  # of the cursor, behind the text; None when a resize has moved it, until the next line
        self.columns = 0
        self.erase = ""  # what takes the line away, while there is one

    def before_text(self) -> None:
        # The line goes first, since the text may run over it.
        self._write(self.erase)
        self.erase = ""

    def after_text(self, session, step) -> None:
        cache, columns = session.cache, os.get_terminal_size(sys.stderr.fileno()).columns or 80
        held = f"{step.cache_tokens}/{cache.capacity} tokens, {of(step.cache_bytes, cache.bytes_reserved)}"
        line = f"[cache {held} | {session.last.decode_tok_s:.1f} tok/s{verified(step)}]"[: columns - 1]
        line = f"{self.dim}{line}{self.plain}"
        if not sys.stdout.isatty():
            self._write(f"\r{line}")
            self.erase = "\r\x1b[K"
        elif self._move(step.text.translate(CONTROL), columns):
            # Make room below (index down, up again), then remember the place, write the line and return.
            self._write(f"\x1bD\x1b[A\x1b7\x1b[B\r{line}\x1b8")
            self.erase = "\x1b[J"

    def _move(self, text: str, columns: int) -> bool:
        """Follow the cursor over the text. False in the last column: to move or to erase there would lose the wrap
        that is due, or the character."""
        from prompt_toolkit.utils import get_cwidth

        if self.columns not in (0, columns):
            self.column = None
        self.columns = columns
        if self.column is None and "\n" in text:
            self.column, text = 0, text.rpartition("\n")[2]
        if self.column is None:
            return False
        for character in text:
            width = get_cwidth(character)
            if character == "\n":
                self.column = 0
            elif character == "\t":
                self.column = max(self.column, min(columns - 1, self.column // 8 * 8 + 8))
            else:
                self.column = width if self.column + width > columns else self.column + width
        return self.column < columns

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def verified(step) -> str:
    if step.max_abs_diff is None:
        return ""
    return f" | off by {step.max_abs_diff:.2g}" + ("" if step.argmax_equal else ", ANOTHER TOKEN")


MODES: dict[str, type[Stats]] = {"off": Stats, "summary": Summary, "live": Live, "step": EachStep}


def stats_for(mode: str | None) -> type[Stats]:
    """The stats that a mode names; by default live on a terminal, and summary where a line cannot be rewritten."""
    if mode is None or mode == "live":
        mode = "live" if escapes_work(sys.stderr) else "summary"
    return MODES[mode]


class TextOutput:
    """The answer on stdout as it comes, and the stats on stderr."""

    def __init__(self, mode: type[Stats]):
        self.mode, self.stats = mode, mode()

    def start(self, session) -> None:
        self.stats, self.differences, self.shown = self.mode(), [], ""

    def step(self, session, step) -> None:
        if not self.stats.keeps_text:
            self.stats.before_text()
            self.write(step.text)
        self.stats.after_text(session, step)
        self.differences += [] if step.max_abs_diff is None else [(step.max_abs_diff, step.argmax_equal)]

    def stop(self) -> None:
        """End the line under way, also when the answer broke off."""
        self.stats.before_text()
        if self.shown and self.shown[-1] != "\n":
            self.write("\n")

    def done(self, session) -> None:
        if self.stats.keeps_text:
            self.write(session.last.text)
        self.stop()
        self.stats.done(session)
        if self.differences:
            differences, equal = zip(*self.differences, strict=True)
            same = f"{sum(equal)} of {len(equal)} steps choose the same token"
            note(f"verified against a recompute of the prefix: logits differ by at most {max(differences):.2g}, {same}")

    def write(self, text: str) -> None:
        self.shown = text or self.shown
        sys.stdout.write(text.translate(CONTROL) if sys.stdout.isatty() else text)
        sys.stdout.flush()


class JsonOutput:
    """JSON Lines on stdout: start, a step for each token, done."""

    def start(self, session) -> None:
        self.count = 0
        cache = {
            name: getattr(session.cache, name) for name in ("kind", "capacity", "bytes_per_token", "bytes_reserved")
        }
        turn = pick(session.last, "prompt_tokens", "reused_tokens", "seed")
        self.write({"event": "start", "model": session.model.name, **turn, "cache": cache})

    def step(self, session, step) -> None:
        self.count += 1
        known = {"event": "step", "n": self.count, **pick(step, "token", "text", "cache_tokens", "cache_bytes")}
        checks = {} if step.max_abs_diff is None else pick(step, "max_abs_diff", "argmax_equal")
        self.write({**known, "ms": round(step.seconds * 1e3, 3), **checks})

    def stop(self) -> None:
        """Every line is whole."""

    def done(self, session) -> None:
        counts = ("stop", "text", "prompt_tokens", "reused_tokens", "generated_tokens")
        speeds = ("prefill_s", "decode_s", "prefill_tok_s", "decode_tok_s")
        rounded = {name: round(value, 6) for name, value in pick(session.last, *speeds).items()}
        self.write({"event": "done", **pick(session.last, *counts), **rounded})

    def write(self, event: dict) -> None:
        print(json.dumps(event), flush=True)


def pick(thing, *names: str) -> dict:
    return {name: getattr(thing, name) for name in names}


# ---- conversation


class Conversation:
    """The messages so far, and their ids as the model is to read them."""

    def __init__(self, tokenizer, system: str | None, raw: bool):
        self.tokenizer, self.raw = tokenizer, raw
        self.first = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.first)

    def clear(self) -> None:
        self.messages = list(self.first)

    def ids(self) -> list[int]:
        """Raises TokenizerError when the chat template refuses the messages."""
        if self.raw:
            return self.tokenizer.encode("".join(message["content"] for message in self.messages))
        return self.tokenizer.chat(self.messages)


@contextmanager
def interruptible(session) -> Iterator[None]:
    """Ctrl-C ends the answer with the pass under way; a second one does not wait for that: KeyboardInterrupt."""

    def on_interrupt(signum, frame):
        if session.interrupted:
            raise KeyboardInterrupt
        session.interrupt()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with no_echo():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def no_echo() -> Iterator[None]:
    """Keys typed during an answer wait for the prompt and do not show inside the text."""
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (ImportError, AttributeError, OSError, ValueError, termios.error):  # no terminal, or Windows
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def answer(session, conversation: Conversation, text: str, sampling, output) -> None:
    """Say ``text``, show the answer, and keep both; a message without an answer is not kept.

    Raises one of ``user_errors``, and KeyboardInterrupt when Ctrl-C comes twice or before the answer begins.
    """
    conversation.messages.append({"role": "user", "content": text})
    try:
        show(session, conversation.ids(), sampling, output)
    except BaseException:
        conversation.messages.pop()
        raise
    turn = session.last
    if turn.stop == "interrupt" and not turn.generated_tokens:
        conversation.messages.pop()
    else:
        conversation.messages.append({"role": "assistant", "content": turn.text})
    if turn.stop == "context":
        more = "/clear starts anew, and a larger --ctx-size holds more"
        note(f"the context of {session.cache.capacity} tokens is full; {more}")


def show(session, ids: list[int], sampling, output) -> None:
    """Generate the answer to ``ids`` and show it as it comes."""
    try:
        steps = session.generate(ids, sampling)
    except ValueError as error:  # a tokenizer that is not the model's
        raise ChatError(str(error)) from None
    output.start(session)
    try:
        with interruptible(session):
            for step in steps:
                output.step(session, step)
    finally:
        output.stop()
    output.done(session)


# ---- REPL


@dataclass(frozen=True)
class Command:
    arguments: str
    help: str
    run: Callable[[Repl, str], None]


class Repl:
    """Reads messages and commands until Ctrl-D."""

    def __init__(self, session, conversation: Conversation, sampling, output: TextOutput):
        self.session, self.conversation, self.sampling, self.output = session, conversation, sampling, output
        self.over = False
        self.pasted = ""  # what was pasted into an empty line

    def run(self) -> None:
        """Read and answer until /quit or Ctrl-D."""
        cache, model = self.session.cache, self.session.model
        note(
            f"{model.name}, {str(model.dtype).removeprefix('torch.')} on {model.device.type}; "
            f"context {cache.capacity} tokens, {cache.bytes_per_token:,} bytes of cache each; /help lists the commands"
        )
        read = self._prompt()
        while not self.over:
            try:
                self.pasted = ""
                self._take(read())
            except KeyboardInterrupt:
                continue
            except EOFError:
                break

    def _take(self, text: str) -> None:
        # A command is a whole line that was typed; a paste is a message, whatever its lines say.
        pasted = self.pasted and text.startswith(self.pasted)
        if text.startswith("/") and "\n" not in text and not pasted:
            name, _, argument = text[1:].strip().partition(" ")
            if name in COMMANDS:
                COMMANDS[name].run(self, argument.strip())
            else:
                note(f"no command /{name}; /help lists them")
        elif text.strip():
            try:
                with bracketed_paste():
                    answer(self.session, self.conversation, text, self.sampling, self.output)
            except user_errors() as error:
                note(str(error))

    def _prompt(self) -> Callable[[], str]:
        """What reads a message: with editing and history, where the terminal can."""
        if not escapes_work(sys.stdout):
            sys.stdin.reconfigure(errors="replace")
            return lambda: input("> ")
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.keys import Keys

        bindings = KeyBindings()

        @bindings.add("escape", "enter")
        def _(event):
            event.current_buffer.insert_text("\n")

        @bindings.add(Keys.BracketedPaste)
        def _(event):
            buffer, text = event.current_buffer, event.data.replace("\r\n", "\n").replace("\r", "\n")
            if not buffer.document.text_before_cursor:
                self.pasted = text
            buffer.insert_text(text)

        class History(FileHistory):
            def store_string(self, string: str) -> None:
                with suppress(OSError):  # a full disk is no reason to stop talking
                    super().store_string(string.encode("utf-8", "replace").decode())

        try:
            history = History(private_file(state_folder() / "history"))
        except (OSError, RuntimeError) as error:  # the latter from a person without a home
            note(f"messages are not kept from one run to the next: {error}")
            history = InMemoryHistory()
        return PromptSession("> ", history=history, key_bindings=bindings).prompt

    # ---- commands

    def help(self, argument: str) -> None:
        for name, command in COMMANDS.items():
            print(f"/{name + ' ' + command.arguments:<30} {command.help}")
        print(f"{'Alt+Enter':<31} a new line in the message")
        print(f"{'Ctrl-C, Ctrl-D':<31} end the answer, leave")

    def clear(self, argument: str) -> None:
        self.conversation.clear()
        note("the conversation is empty; a system message stays")

    def set_stats(self, argument: str) -> None:
        if argument not in MODES:
            note(f"/stats takes one of {', '.join(MODES)}")
            return
        self.output.mode = stats_for(argument)

    def quit(self, argument: str) -> None:
        self.over = True


COMMANDS = {
    "help": Command("", "this list", Repl.help),
    "clear": Command("", "forget the conversation, but for the system message", Repl.clear),
    "stats": Command("|".join(MODES), "what is shown of cache and speed", Repl.set_stats),
    "quit": Command("", "leave, as Ctrl-D does", Repl.quit),
}


@contextmanager
def bracketed_paste() -> Iterator[None]:
    """What is pasted during an answer stays marked as a paste, as the prompt has it, and is not read as typed
    lines."""
    on, off = ("\x1b[?2004h", "\x1b[?2004l") if escapes_work(sys.stdout) else ("", "")
    print(on, end="", flush=True)
    try:
        yield
    finally:
        print(off, end="", flush=True)


def state_folder() -> Path:
    """Where what outlives a run is kept. Raises RuntimeError when there is no home folder."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "kv-chat"


def private_file(path: Path) -> Path:
    """The path of a file, made if need be, that nobody else may read from its first instant. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    return path


# ---- main


def user_errors() -> tuple[type[Exception], ...]:
    """What a person can cause and mend, each with a text of one line."""
    from cache import CacheFull
    from generate import NotFinite
    from model import ModelError
    from tokenizer import TokenizerError
    from weights.get import GetError

    return ChatError, CacheFull, NotFinite, ModelError, TokenizerError, GetError


def run(argv: list[str] | None) -> int:
    """Do what the arguments ask for; the exit code. Raises ChatError or another of ``user_errors``."""
    args = arguments(argv)
    if args.list:
        list_models()
        return 0
    if args.plan:
        plan(args)
        return 0
    text = prompt_text(args)
    if text is None and args.json:
        raise ChatError("--json needs -p TEXT or piped stdin")
    if args.raw and args.system:
        raise ChatError("--system needs the chat template that --raw leaves out")
    sampling = sampling_of(args)
    session = open_session(args)
    if args.raw:
        session.tokenizer.strips_first_space = False  # the answer goes on from a text, and does not begin one
    conversation = Conversation(session.tokenizer, args.system, args.raw)
    if not args.raw and not session.tokenizer.has_template:
        from tokenizer import PLAIN_STOP

        note("this model has no chat template and gets plain User: … Assistant: …; --raw goes on from your text alone")
        sampling = replace(sampling, stop=(*sampling.stop, PLAIN_STOP))
    output = JsonOutput() if args.json else TextOutput(stats_for(args.stats))
    if text is None:
        Repl(session, conversation, sampling, output).run()
        return 0
    answer(session, conversation, text, sampling, output)
    return 130 if session.last.stop == "interrupt" else 0


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0; 2 for what the user must mend, after one line on stderr; 130 after Ctrl-C. A closed pipe ends
    quietly. Raises SystemExit after --help."""
    sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # an answer that the terminal cannot encode is shown all the same
    try:
        try:
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
            note(str(error))
        # What could not be written is still held back, and would be tried again when Python ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return 0 if closed else 2
    except Exception as error:
        if not isinstance(error, user_errors()):
            raise
        note(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
