"""What the tests have several ranks do, each a process that runs this file; one process does the same without.

python ranks.py answers OUT STATE {"name": "folder", …}
python ranks.py chat RANK FAULT argv…        chat.py, of which one rank fails
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from threading import Timer

import torch
from torch import distributed

import parallel
from batch import Batch
from generate import Sampling, Session, SessionError, VerifyingSession
from speculate import Lookup
from tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
GREEDY, PROMPT = Sampling(temperature=0, max_tokens=10), [1, *range(60, 85)]


# ---- answers


def opened(folder: str, quantize: str | None = None):
    return parallel.load(Path(folder), torch.device("cpu"), torch.float32, quantize), Tokenizer.from_folder(folder)


def tokens_of(session: Session, prompt=PROMPT, sampling: Sampling = GREEDY) -> list[int]:
    for _ in session.generate(prompt, sampling):
        pass
    return list(session.tokens)


def answers(state: Path, folders: dict[str, str]) -> dict[str, object]:
    """What models answer, in every way that there is: all tokens greedy or of a seed, so that it is always the same."""
    said = {}
    for name, folder in folders.items():
        llama, tokenizer = opened(folder)
        said[name] = tokens_of(Session(llama, parallel.make("contiguous", llama, 64), tokenizer))
    if "default" in folders:
        return said
    llama, tokenizer = opened(folders["GQA"])
    for kind in ("paged", "int8", "int4", "offload", "window", "sinks", "none"):
        session = Session(llama, parallel.make(kind, llama, 128), tokenizer)
        said[kind] = tokens_of(session), tokens_of(session, [*PROMPT[:9], *range(90, 140)])
    for quantize in ("int8", "int4"):
        packed, _ = opened(folders["wide"], quantize)
        said[f"{quantize} weights"] = tokens_of(Session(packed, parallel.make("contiguous", packed, 64), tokenizer))

    session = Session(llama, parallel.make("paged", llama, 256), tokenizer)
    said["sampled"] = tokens_of(session, PROMPT, Sampling(temperature=1, top_p=0.9, seed=7, max_tokens=10))
    twin = session.fork()
    said["branches"] = tokens_of(twin, [*session.tokens, 70]), tokens_of(session, [*session.tokens, 71])
    session.drafts = Lookup()
    said["drafted"] = tokens_of(session, PROMPT * 2)

    verifying = VerifyingSession(llama, parallel.make("contiguous", llama, 64), tokenizer)
    assert all(step.max_abs_diff < 1e-3 and step.argmax_equal for step in verifying.generate(PROMPT, GREEDY))
    said["batch"] = batch_answers(llama, tokenizer)
    said["interrupted"] = interrupted_answer(llama, tokenizer)
    said["kept"] = kept_answer(llama, tokenizer, state / f"kept-{llama.world}")
    return said


def batch_answers(llama, tokenizer) -> list[str]:
    """Of prompts that begin alike and of samples, over so few pages that some wait."""
    batch = Batch(llama, tokenizer, parallel.make("paged", llama, 96).pool, 64)
    for i in range(4):
        batch.add(2 * i, [*PROMPT, 60 + i], Sampling(seed=i, max_tokens=8), samples=2)
    texts = {}
    while batch.busy:
        texts |= {sequence.index: sequence.turn.text for sequence in batch.step()}
    return [texts[index] for index in sorted(texts)]


def interrupted_answer(llama, tokenizer) -> list[int]:
    """After Ctrl-C at any instant, the ranks agree on what they hold."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    session, heard = Session(llama, parallel.make("paged", llama, 512), tokenizer), 0
    for after in (0.02, 0.05, 0.1):
        timer = Timer(after, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            tokens_of(session, PROMPT, Sampling(temperature=0, max_tokens=400))
            timer.join()
        except KeyboardInterrupt:
            heard += 1
    signal.signal(signal.SIGINT, before)
    return tokens_of(session)


def kept_answer(llama, tokenizer, path: Path) -> list[int]:
    """Goes on from what was kept, of which every rank has its part; where one's is amiss, from the text."""
    session = Session(llama, parallel.make("int8", llama, 128), tokenizer)
    tokens_of(session)
    session.save(path, "about")
    again = Session(llama, parallel.make("int8", llama, 128), tokenizer)
    assert again.load(path) == "about" and again.cache.length == len(again.tokens) - 1
    kept = tokens_of(again, [*again.tokens, 80])
    if llama.world > 1:
        check_parts(again, path)
        assert tokens_of(again, kept[:-10]) == kept
    return kept


def check_parts(session: Session, path: Path) -> None:
    """What is said and what is left where rank 1 cannot write, place, find or read its part."""
    part, files = Path(f"{path}.1"), sorted(path.parent.glob(f"{path.name}*"))

    def refused(does, *args) -> SessionError:
        try:
            does(*args)
        except SessionError as error:
            return error
        raise AssertionError("all went well")

    token_hex, secrets.token_hex = secrets.token_hex, lambda _: "mark"
    blocked = path.with_name(f".{part.name}.mark")  # where it would write
    blocked.mkdir()
    assert str(refused(session.save, path, "new")) == f"rank 1: {part}: File exists; nothing was saved"
    blocked.rmdir()
    secrets.token_hex = token_hex
    assert session.load(path) == "about"  # no rank has replaced its part

    old = part.read_bytes()
    for damage, why in (
        (part.mkdir, f"{part}: Is a directory"),
        (lambda: part.write_bytes(old[:100]), f"{part}: Error while deserializing"),
        (lambda: part.write_bytes(old), f"{part} was saved at another time"),
        (lambda: None, f"{part}: No such file or directory"),
    ):
        part.unlink()
        damage()
        if part.is_dir():
            told = f"rank 1: {why}; its text was saved, and its cache was not"
            assert str(refused(session.save, path, "new")) == told
        error = refused(session.load, path)
        assert str(error).startswith(f"rank 1: {why}") and (error.part, error.about) == ("", "new")
        assert session.cache.length == 0
        if part.is_dir():
            part.rmdir()
            part.touch()
    session.save(path, "newer")
    assert session.load(path) == "newer" and sorted(path.parent.glob(f"{path.name}*")) == files
    assert not list(path.parent.glob(f".{path.name}*"))


# ---- processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(world: int, *argv, **options) -> list[subprocess.Popen]:
    """A process for each rank, as torchrun starts them."""
    port = free_port()
    return [started_one(rank, world, port, __file__, *argv, **options) for rank in range(world)]


def started_one(rank: int, world: int, port: int, *argv, **options) -> subprocess.Popen:
    said = {  # by torchrun
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "PYTHONPATH": ROOT,
        "OMP_NUM_THREADS": 1,
    }
    environment = {**os.environ, **{name: str(value) for name, value in said.items()}}
    command = [sys.executable, *map(str, argv)]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, **options)


def fail(fault: str) -> None:
    """The next pass over layers ends this rank, or makes it hang."""
    import model

    def fails(*_):
        if fault == "memory":
            raise MemoryError
        if fault == "fault":
            raise ZeroDivisionError("so it goes")
        if fault == "sleeps":
            time.sleep(100)
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "hangs": signal.SIGSTOP}[fault])

    model.MLP.forward = fails


def main() -> int:
    if sys.argv[1] == "answers":
        _, _, out, state, folders = sys.argv
        Path(out).write_text(json.dumps(answers(Path(state), json.loads(folders))))
        return 0
    import chat

    return chat.main(sys.argv[4:])


if __name__ == "__main__":
    if "sleeps" in sys.argv:
        parallel.PATIENCE = timedelta(seconds=5)
    if sys.argv[1] == "chat" and sys.argv[2] == os.environ["RANK"]:
        fail(sys.argv[3])
    code = parallel.run(main)
    assert not distributed.is_initialized()  # a thread of it that lets go of a tensor while Python ends would abort
    sys.exit(code)
