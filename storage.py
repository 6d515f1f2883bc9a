"""Tensors on disk: a safetensors file that is written whole beside its place, and then put there or discarded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time

import torch
from safetensors import safe_open
from torch import Tensor

STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64"}


def write_tensors(path: Path, mark: str, tensors: Iterable[tuple[str, Tensor]], metadata: dict[str, str]) -> None:
    """Write a safetensors file (its format: 8 bytes of header length, a JSON header padded with spaces, the data)
    beside ``path``; ``place`` puts it there, by the same ``mark``. Raises OSError.

    The library would want all tensors in memory at once; a cache may be larger than that. Its header comes last, so
    the room for it is a guess that no cache exceeds.
    """
    for left in path.parent.glob(f".{path.name}.*"):  # by a process that was killed
        with suppress(FileNotFoundError):  # it was another's, who has just renamed it
            if left.stat().st_mtime < time() - 3600:
                left.unlink()
    with naming(path), open(beside(path, mark), "xb", opener=private) as file:
        room, end, header = 2**16 + 2 * len(json.dumps(metadata)), 0, {"__metadata__": metadata}
        file.seek(8 + room)
        for name, tensor in tensors:
            start, end = end, end + tensor.nbytes
            header[name] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
            file.write(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy())
        file.seek(0)
        file.write(room.to_bytes(8, "little") + json.dumps(header).encode().ljust(room))
        file.flush()
        os.fsync(file.fileno())


def place(path: Path, mark: str) -> None:
    """Put what was written in the place of the old file. Raises OSError, the old file being whole."""
    with naming(path):
        os.replace(beside(path, mark), path)
    with suppress(OSError):  # the new name is kept too, where a system can; it is there all the same
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def discard(path: Path, mark: str) -> None:
    """Delete what was written and is not in its place, if anything is."""
    with suppress(OSError):
        beside(path, mark).unlink()


def opened(path: Path):
    """``safe_open``, but an OSError says which file and why."""
    with open(path, "rb"):
        return safe_open(path, framework="pt")


def beside(path: Path, mark: str) -> Path:
    return path.with_name(f".{path.name}.{mark}")


def private(path: str, flags: int) -> int:
    """Opens a file that only its owner may read."""
    return os.open(path, flags, 0o600)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError names ``path``, and no file that a person does not know."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
