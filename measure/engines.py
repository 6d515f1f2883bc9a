"""One engine in a process of its own, timed: it loads, says how long that took, and answers what it is asked.

So load time and memory are its own, and it waits while another one is timed. An answer is a prompt read and some steps
after it; nothing is timed that was not waited for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

ROOM = 32  # most steps after a prompt

# Row of the table -> what `chat.py` calls its --cache, and its --quantize.
OURS = {
    "contiguous": ("contiguous", None),
    "int8-weights": ("contiguous", "int8"),
    "int4-weights": ("contiguous", "int4"),
    "paged": ("paged", None),
    "int8-cache": ("int8", None),
    "int4-cache": ("int4", None),
    "none": ("none", None),
}


@dataclass(frozen=True)
class Subject:
    """What is measured: the weights in a model folder (for llama.cpp, a GGUF file), or random ones for a config.json.

    device and dtype are torch's names; dtype None is the stored one. ``threads`` is for engines without torch, and
    ``compiled`` for ours: whether torch compiles the steps.
    """

    weights: str | None
    config: dict | None = None
    device: str = "cpu"
    dtype: str | None = None
    threads: int = 1
    compiled: bool = False

    def model(self, quantize: str | None = None):
        """A Llama of it. Raises ModelError."""
        from model import DTYPES, Config, load, random_model

        dtype = None if quantize else DTYPES.get(self.dtype)  # packed weights choose theirs
        if self.config is None:
            return load(self.weights, self.device, dtype, quantize)
        return random_model(Config.from_json(self.config), self.device, dtype, quantize)


class Silent:
    """A tokenizer for which no token ends an answer, and none is text."""

    stop_ids, strips_first_space = frozenset(), False

    def piece(self, token: int) -> bytes:
        return b""


class Ours:
    """This engine: sessions over one model, one for each length of prompt, so that each is read but once."""

    @staticmethod
    def prepare(subject: Subject) -> None:
        """Import what it needs, which is no part of loading."""
        import generate  # noqa: F401

    def __init__(self, row: str, subject: Subject):
        self.kind, quantize = OURS[row]
        self.model, self.compiled, self.sessions = subject.model(quantize), subject.compiled, {}

    def answer(self, prompt: list[int], steps: int, anew: bool) -> dict[str, float]:
        """Read a prompt, ``anew`` or but for its last token as it was read before, and take some steps after it.

        Seconds to the first token and of a step, and the bytes of weights and cache that the last step read.
        """
        from generate import Sampling

        session = self._session(len(prompt))
        if anew:
            session.cache.truncate(0)
        times = [step.seconds for step in session.generate(prompt, Sampling(temperature=0, max_tokens=steps + 1))]
        read = self.model.bytes_per_step + session.cache.bytes_used
        return {"first_s": session.last.prefill_s + times[0], "step_s": median(times[1:]), "bytes": read}

    def _session(self, length: int):
        from cache import make
        from generate import Session

        if self.compiled and not self.sessions:
            self.model.compile_steps()  # with the first step, which is of the warm-up
        if length not in self.sessions:
            model = self.model
            cache = make(self.kind, model.config, length + ROOM, model.device, model.dtype)
            self.sessions[length] = Session(model, cache, Silent())
        return self.sessions[length]


class Roof:
    """The machine itself: what no engine can do better than."""

    @staticmethod
    def prepare(subject: Subject) -> None:
        import generate  # noqa: F401

    def __init__(self, row: str, subject: Subject):
        self.device = subject.device
        self.slow: dict[str, float] = {}  # operations per second in dtypes that are not worth measuring again

    def answer(self) -> dict[str, float]:
        """Bytes per second of memory, the better of a sum, which reads, and a copy, which reads and writes; and
        operations per second of large matrices in each dtype. Best of several; but a processor without kernels for a
        dtype would take most of a round, so one ten times slower than float32 is measured once."""
        import torch

        large = self.device != "cpu"
        found = {"bandwidth": self._bandwidth(2**32 if large else 2**29)}  # no processor caches that
        size = 8192 if large else 1024
        for name in ("float32", "bfloat16", "float16"):
            if name in self.slow:
                continue
            a = torch.ones(size, size, device=self.device, dtype=getattr(torch, name))
            product = partial(torch.mm, a, a)
            speed = 2 * size**3 / self._seconds(product, 2)
            if speed < found.get("float32", 0) / 10:
                self.slow[name] = speed
            else:
                found[name] = max(speed, 2 * size**3 / self._seconds(product, 4))
        return found | self.slow

    def _bandwidth(self, size: int) -> float:
        import torch

        x = torch.ones(size // 4, device=self.device)
        half, other = x.chunk(2)
        return x.nbytes / min(self._seconds(x.sum, 6), self._seconds(partial(half.copy_, other), 6))

    def _seconds(self, action: Callable, times: int) -> float:
        import torch

        from generate import synchronize

        def once() -> float:
            start = perf_counter()
            action()
            synchronize(torch.device(self.device))
            return perf_counter() - start

        return min(once() for _ in range(times))


def engine_class(row: str) -> type:
    if row in OURS:
        return Ours
    if row == "roof":
        return Roof
    from measure.peers import LlamaCpp, Transformers

    return Transformers if row.startswith("transformers") else LlamaCpp


# ---- the process


def serve(row: str, subject: Subject) -> None:
    """Be one engine: load, say how long it took, then answer what each line of stdin asks for."""
    try:
        cls = engine_class(row)
        cls.prepare(subject)
        wait = waiter(subject.device)
        start = perf_counter()
        engine = cls(row, subject)
        wait()
        say(load_s=perf_counter() - start)
        for line in sys.stdin:
            say(**engine.answer(**json.loads(line)), peak=peak_bytes(subject.device))
    except Exception as error:  # whatever an engine stumbles over, the others are measured
        say(error=" ".join(str(error).split()) or type(error).__name__)


def say(**what) -> None:
    print(json.dumps(what), flush=True)


def waiter(device: str) -> Callable[[], None]:
    """What waits for the device, which is awake from here on; a CPU needs neither."""
    if device == "cpu":
        return lambda: None
    import torch

    torch.zeros(1, device=device)
    return getattr(torch, torch.device(device).type).synchronize


def peak_bytes(device: str) -> int:
    """Most memory that this process has had: on a GPU the GPU's, elsewhere its own."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_reserved()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Stopped(Exception):
    """An engine that cannot go on; the text says why."""


class Engine:
    """A process that runs ``serve``. Raises Stopped wherever it stops."""

    def __init__(self, row: str, subject: Subject):
        command = [sys.executable, "-m", "measure.engines", row, json.dumps(asdict(subject))]
        self.row, self.subject = row, subject
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, **pipes)
        self.load_s = self._answer()["load_s"]

    def ask(self, **what) -> dict[str, float]:
        """What the engine's ``answer`` gives, and its ``peak`` of memory."""
        print(json.dumps(what), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, float]:
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it ended; what it said stands above"}
        if "error" in answer:
            self.close()
            raise Stopped(answer["error"])
        return answer

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


if __name__ == "__main__":
    serve(sys.argv[1], Subject(**json.loads(sys.argv[2])))
