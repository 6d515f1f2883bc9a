"""Many processes act as one model: tensor parallelism (Megatron-LM, arXiv 1909.08053).

    torchrun --nproc-per-node 4 chat.py

Rank 0 has the terminal, the session and the sampler. The others follow: what rank 0 does to a model or a cache, it
tells them first, and they do it to their parts. So a token is drawn once, and nothing that depends on the time or on a
person is decided twice. Only the sums inside the model go through torch.distributed (linear.py). What is told goes
through sockets, as lines of JSON: a chat may be idle for hours, and nobody waits meanwhile in a collective, which would
time out.

Every rank says each second that it is alive. When one has died or hangs, the others end at once, and one of them says
which it was: a sum that lacks a part is worth nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from errno import ENOMEM
from functools import reduce
from itertools import count
from pathlib import Path
from queue import Queue
from threading import Lock, Thread
from time import monotonic, sleep

import torch
from torch import Tensor, distributed

import cache
import model
from paged import PagedBatch, Pool
from seam import CacheFull, KVCache, RankError
from show import ENDINGS, note, reason

SILENCE = 12  # seconds after which a rank that says nothing is given up
PATIENCE = timedelta(seconds=20)  # for a collective, where a rank says that it lives and does nothing
ARRIVAL = timedelta(minutes=5)  # for all ranks to be there: from a cold disk, torch alone takes its time
LOST = 2  # exit code

# What changes a model, a cache or a pool, or is computed by all, is done by every rank; whatever else is asked of one,
# rank 0 knows alone. The first do the same everywhere, errors too, so that nobody waits for an answer.
ALIKE = (
    *("__call__", "head", "extend", "truncate", "counts", "fork", "publish", "adopt", "sequence", "forget"),
    "discard",
)
ANSWERED = ("save", "place", "load")  # they depend on a rank's disk
SHARED = (model.Llama, KVCache, Pool)  # what every rank has its part of


class Lost(Exception):
    """A rank that has ended or hangs; the text is one line that names it."""


# ---- what chat.py uses


def run(main: Callable[[], int]) -> int:
    """Be one of torchrun's ranks: the first runs ``main``, whose exit code is returned; the others follow it, and end
    with it."""
    try:
        rank, world = place_among_ranks()
    except ValueError as error:
        note(str(error))
        return LOST
    if world == 1:
        return main()
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's would wait, as this does, for the others
    ending = Ending()
    try:
        store, _, _ = next(distributed.rendezvous("env://", timeout=ARRIVAL))
        lines = connected(store, rank, world, ending)
        distributed.init_process_group(backend(), store=store, rank=rank, world_size=world, timeout=PATIENCE)
    except (OSError, RuntimeError, ValueError) as error:
        ending.now(f"rank {rank} cannot reach the others: {first_line(error)}")
    if rank:
        for signum in (signal.SIGINT, *ENDINGS):  # rank 0 decides what they mean
            signal.signal(signum, signal.SIG_IGN)
        Follower(lines[0], rank).run()
    signal.signal(signal.SIGINT, interrupt)
    Leader.here = Leader(lines, ending)
    try:
        return main()
    finally:
        ending.begin()
        distributed.destroy_process_group()  # its threads hold tensors, and must let go before Python ends


def place_among_ranks() -> tuple[int, int]:
    """This rank, and how many there are, as torchrun says. Raises ValueError for what it would not say."""
    rank, world = number("RANK"), number("WORLD_SIZE")
    if world < 1:
        raise ValueError(f"WORLD_SIZE is {world}, and there is at least one rank")
    if not 0 <= rank < world:
        raise ValueError(f"RANK is {rank}, and with a WORLD_SIZE of {world} it is from 0 to {world - 1}")
    return rank, world


def number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(f"{name} is {os.environ[name]!r}, and no whole number") from None


def load(folder: Path, device: torch.device, dtype: torch.dtype | None, quantize: str | None):
    """As ``model.load``, on every rank. Raises RankError too."""
    if Leader.here is None:
        return model.load(folder, device, dtype, quantize)
    Leader.here.everywhere("survey", str(folder), quantize)  # so that none waits in a sum for one that cannot load
    name = dtype and str(dtype).removeprefix("torch.")
    return Leader.here.everywhere("load", str(folder), str(device), name, quantize)


def make(kind: str, llama, capacity: int, **options):
    """As ``cache.make``, for every rank's part of a model. Raises RankError too."""
    if Leader.here is None:
        return cache.make(kind, llama.config, capacity, llama.device, llama.dtype, **options)
    known = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return Leader.here.everywhere("make", kind, llama, capacity, known)


# ---- lines between ranks


class Line:
    """Messages to and from another rank: JSON objects, one a line; an empty line says that it lives.

    ``arrived`` are those that came. When the other rank is lost, or says that all is over, this process ends.
    """

    def __init__(self, connection: socket.socket, rank: int, ending: Ending):
        connection.settimeout(SILENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._file, self._sending = connection, connection.makefile("rb"), Lock()
        self._mine, self._ending, self.arrived = rank, ending, Queue()
        self.send({"rank": rank, "process": os.getpid(), "machine": socket.gethostname()})
        self.other = json.loads(self._file.readline())
        self.rank = self.other["rank"]
        for work in (self._listen, self._live):
            Thread(target=work, daemon=True).start()

    def send(self, message: dict | None) -> None:
        data = b"\n" if message is None else json.dumps(message).encode() + b"\n"
        with self._sending, suppress(OSError):  # of a rank that is lost, as the listener will find
            self._connection.sendall(data)

    def _live(self) -> None:
        while True:
            self.send(None)
            sleep(1)

    def _listen(self) -> None:
        try:
            while "over" not in (message := self._receive()):
                if "trouble" in message:
                    self._ending.heard(self.rank, **message)
                else:
                    self.arrived.put(message)
            os._exit(0)
        except Lost as lost:
            self._ending.now(str(lost), aloud=self._mine < 2)  # rank 0 of another one, rank 1 of rank 0

    def _receive(self) -> dict:
        data = b"\n"
        while data == b"\n":
            try:
                data = self._file.readline()
            except TimeoutError:
                self._kill()
                raise Lost(f"rank {self.rank} has said nothing for {SILENCE} seconds") from None
            except OSError:
                data = b""
        if not data:
            raise Lost(f"rank {self.rank} is gone; perhaps the system killed it for want of memory")
        return json.loads(data)

    def _kill(self) -> None:
        """A rank that hangs does not end by itself; on another machine it is torchrun's affair."""
        if self.other["machine"] == socket.gethostname():
            with suppress(OSError):
                os.kill(self.other["process"], signal.SIGKILL)


def connected(store: distributed.Store, rank: int, world: int, ending: Ending) -> list[Line]:
    """Rank 0's lines to all others, or another rank's line to it. Raises OSError or RuntimeError.

    Rank 0's machine is torchrun's MASTER_ADDR, and where no other takes part it is not reachable from outside. Its port
    is told through torchrun's store.
    """
    alone = "LOCAL_WORLD_SIZE" not in os.environ or number("LOCAL_WORLD_SIZE") == world
    host = "127.0.0.1" if alone else os.environ["MASTER_ADDR"]
    if rank:
        line = Line(socket.create_connection((host, int(store.get("chat port"))), SILENCE), rank, ending)
        line.arrived.get()  # all are there
        return [line]
    with socket.create_server((host if alone else "", 0), backlog=world) as server:
        server.settimeout(ARRIVAL.total_seconds())
        store.set("chat port", str(server.getsockname()[1]))
        lines = [Line(server.accept()[0], rank, ending) for _ in range(world - 1)]
    for line in lines:
        line.send({"here": world})
    return lines


def backend() -> str:
    """What sums tensors: gloo those on a CPU, NCCL those on GPUs."""
    gpus = torch.cuda.is_available() and distributed.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if gpus else "gloo"


class Ending:
    """How this process ends when a rank is lost: at once, from any thread, after one line, with the terminal as it was
    found. ``others`` are told; rank 0 has them."""

    def __init__(self):
        self.others: list[Line] = []
        self._first, self._modes, self._waited = Lock(), None, {}
        with suppress(ImportError, AttributeError, OSError, ValueError):
            import termios

            with suppress(termios.error):
                self._modes = termios.tcgetattr(sys.stdin.fileno())

    def heard(self, rank: int, trouble: str, waited: bool) -> None:
        """What a rank cannot go on after: an error of its own, or that it waited in vain for the others in a sum. Soon
        all have, but the one that hangs."""
        if not waited:
            self.now(f"rank {rank}: {trouble}")
        self._waited[rank] = f"rank {rank}: {trouble}"
        if len(self._waited) == 1:
            Thread(target=self._blame, daemon=True).start()

    def _blame(self) -> None:
        sleep(5)
        hanging = [rank for rank in range(len(self.others) + 1) if rank not in self._waited]
        self.now(f"rank {hanging[0]} hangs" if hanging else next(iter(self._waited.values())))

    def begin(self) -> None:
        """Tell the others that all is over, whatever they do. A second thread that wants to waits for the first."""
        if not self._first.acquire(blocking=False):
            sleep(60)
        for line in self.others:
            line.send({"over": True})

    def now(self, text: str, aloud: bool = True) -> None:
        self.begin()
        if aloud:
            self._restore_terminal()
            note(text)
        os._exit(LOST)

    def _restore_terminal(self) -> None:
        if self._modes:
            import termios

            with suppress(termios.error, OSError):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._modes)
                print("\x1b[?2004l\x1b[?25h\n\x1b[J", end="", file=sys.stderr)


# ---- rank 0


class Mirrored:
    """A model, a cache or a pool of which every rank has a part, rank 0's being ``_here``."""

    def __init__(self, leader: Leader, name: str, here: object, whole: Mirrored | None = None):
        self._leader, self._name, self._here, self._whole = leader, name, here, whole
        if whole is None:
            weakref.finalize(self, leader.unused.append, name)

    def __getattr__(self, name: str):
        value = getattr(self._here, name)
        if name in ALIKE:
            return lambda *args: self._leader.alike(self, name, *args)
        if name in ANSWERED:
            return lambda *args: self._leader.answered(self, name, *args)
        return Mirrored(self._leader, f"{self._name}.{name}", value, self) if isinstance(value, Pool) else value

    def __call__(self, *args):
        return self._leader.alike(self, "__call__", *args)


class Leader:
    """Rank 0's side: has things done by all ranks, itself among them."""

    here: Leader | None = None

    def __init__(self, lines: list[Line], ending: Ending):
        self.lines, self.ending, ending.others = lines, ending, lines
        self.unused: list[str] = []  # names that nobody here uses any more
        self._numbers = count()

    def alike(self, target: Mirrored, method: str, *args):
        """Have every rank call a method that does the same on all of them. Raises what it raises."""
        with undisturbed():
            start = monotonic()
            try:
                name = self._tell(target, method, args, answer=False)
                return self._shared(name, getattr(target._here, method)(*map(here, args)))
            except Exception as error:
                if is_fatal(error):
                    self._end(error, start)
                raise

    def answered(self, target: Mirrored, method: str, *args):
        """Have every rank call a method that may fail on some of them. Raises what it raises here, or RankError."""
        try:
            return self._all(target, method, getattr(target._here, method), args)
        except Exception:
            if method == "load":  # some hold what was loaded, and others do not
                self.alike(target, "truncate", 0)
            raise

    def everywhere(self, function: str, *args):
        """Have every rank call one of FUNCTIONS. Raises what it raises here, or RankError."""
        return self._all(None, function, FUNCTIONS[function], args)

    def _all(self, target: Mirrored | None, method: str, does: Callable, args: tuple):
        result, errors = None, []
        with undisturbed():
            name, start = self._tell(target, method, args, answer=True), monotonic()
            try:
                result = does(*map(here, args))
            except Exception as error:
                if is_fatal(error):
                    self._end(error, start)
                errors.append(error)
            for line in self.lines:
                if error := line.arrived.get().get("error"):
                    errors.append(RankError(f"rank {line.rank}: {error}"))
            result = self._shared(name, result)
        if errors:
            self.unused.append(name)  # by which some may know a result
            raise errors[0]
        return result

    def _tell(self, target: Mirrored | None, method: str, args: tuple, answer: bool) -> str:
        """Tell the others; the name that the result has among ranks."""
        name, unused = str(next(self._numbers)), [self.unused.pop() for _ in range(len(self.unused))]
        to, known = target and target._name, [told(arg) for arg in args]
        for line in self.lines:
            line.send({"do": method, "to": to, "args": known, "name": name, "answer": answer, "unused": unused})
        for arg in args:
            if isinstance(arg, Tensor) and arg.is_floating_point():
                distributed.broadcast(arg.contiguous(), 0)
        return name

    def _shared(self, name: str, result):
        return Mirrored(self, name, result) if isinstance(result, SHARED) else result

    def _end(self, error: Exception, start: float) -> None:
        """The others may wait for this rank now, or it for them."""
        self.ending.heard(0, **trouble(error, start))
        sleep(60)


def here(arg: object) -> object:
    return arg._here if isinstance(arg, Mirrored) else arg


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals wait meanwhile: a rank that left a pass half way would leave the others in it."""
    heard: list[int] = []
    known = [signum for signum in (signal.SIGINT, *ENDINGS) if callable(signal.getsignal(signum))]
    before = {signum: signal.signal(signum, lambda signum, frame: heard.append(signum)) for signum in known}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for signum in heard:
            signal.raise_signal(signum)


def told(arg: object) -> tuple[str, object]:
    """An argument as JSON, and of which kind it is; ``Follower._heard`` is the inverse."""
    if isinstance(arg, Mirrored):
        return "shared", arg._name
    if isinstance(arg, PagedBatch):
        return "batch", [sequence._name for sequence in arg.sequences]
    if isinstance(arg, cache.NoCache):  # of a pass that recomputes, which rank 0 has made for itself
        return "nothing", len(arg.positions)
    if isinstance(arg, Path):
        return "file", str(arg)
    if isinstance(arg, Tensor):
        return ("values", list(arg.shape)) if arg.is_floating_point() else ("ids", arg.tolist())
    return "plain", arg


# ---- the others


class Follower:
    """Another rank: does what it is told, to its parts, which ``shared`` has by name."""

    def __init__(self, line: Line, rank: int):
        self.line, self.rank = line, rank
        self.shared: dict[str, object] = {}

    def run(self) -> None:
        """Follow, until rank 0 ends and this process with it."""
        while True:
            message, start = self.line.arrived.get(), monotonic()
            try:
                self._do(message)
            except Exception as error:
                self.line.send(trouble(error, start))

    def _do(self, message: dict) -> None:
        for name in message["unused"]:
            self.shared.pop(name, None)
        target = message["to"] and self._named(message["to"])
        does = getattr(target, message["do"]) if target is not None else FUNCTIONS[message["do"]]
        args, answer = [self._heard(target, *arg) for arg in message["args"]], {}
        try:
            result = does(*args)
            if isinstance(result, SHARED):
                self.shared[message["name"]] = result
        except Exception as error:
            if is_fatal(error) or not (message["answer"] or isinstance(error, CacheFull | ValueError)):
                raise
            answer = {"error": first_line(error)}
        if message["answer"]:
            self.line.send(answer)

    def _named(self, name: str):
        first, *attributes = name.split(".")
        return reduce(getattr, attributes, self.shared[first])

    def _heard(self, target, kind: str, value):
        if kind == "shared":
            return self._named(value)
        if kind == "batch":
            return PagedBatch.of([self._named(name) for name in value])
        if kind == "nothing":
            nothing = cache.NoCache(target.config, value, target.device, target.dtype)
            nothing.extend(value)
            return nothing
        if kind == "file":  # each rank has its own
            return Path(f"{value}.{self.rank}")
        if kind == "ids":
            return torch.tensor(value, device=target.device)
        if kind == "values":
            distributed.broadcast(values := torch.empty(value, device=target.device), 0)
            return values
        return value


# ---- what all ranks do to begin with


def survey_part(folder: str, quantize: str | None) -> None:
    model.survey(Path(folder), quantize, distributed.get_rank(), distributed.get_world_size())


def load_part(folder: str, device: str, dtype: str | None, quantize: str | None):
    """As ``model.load``, each rank on its own GPU."""
    if device == "mps":
        raise model.ModelError("ranks compute on cpu or cuda, and not on mps")
    if device == "cuda":
        mine, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if mine >= there:
            raise model.ModelError(f"each rank needs a GPU of its own, and this machine has {there}")
        torch.cuda.set_device(mine)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    return model.load(folder, device, model.DTYPES.get(dtype), quantize, rank, world)


def make_part(kind: str, llama: model.Llama, capacity: int, options: dict) -> KVCache:
    return cache.make(kind, llama.config, capacity, llama.device, llama.dtype, **options)


FUNCTIONS = {"survey": survey_part, "load": load_part, "make": make_part}


# ---- what goes wrong


def is_fatal(error: Exception) -> bool:
    """Whether it leaves ranks at odds: what torch raises, and a lack of memory."""
    return isinstance(error, RuntimeError) or is_for_memory(error)


def is_for_memory(error: Exception) -> bool:
    """Whether memory ran out, other than for what is refused in words."""
    of_torch = isinstance(error, RuntimeError) and "memory" in str(error)
    return of_torch or isinstance(error, MemoryError) or getattr(error, "errno", None) == ENOMEM


def trouble(error: Exception, start: float) -> dict[str, object]:
    """What ``Ending.heard`` is to hear of an error in something that began at ``start``."""
    if is_for_memory(error):
        return {"trouble": f"no memory left ({first_line(error)})", "waited": False}
    waited = isinstance(error, RuntimeError) and monotonic() - start >= PATIENCE.total_seconds()
    if not waited:
        sleep(3)  # a sum fails at once where a rank is gone, and that is heard of before
    return {"trouble": f"{type(error).__name__}: {first_line(error)}", "waited": waited}


def first_line(error: Exception) -> str:
    return next(iter(reason(error).splitlines()), type(error).__name__)
