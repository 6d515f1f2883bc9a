"""Tensors on disk: a safetensors file that is written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import time

import torch
from torch import Tensor

STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64"}


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]], metadata: dict[str, str]) -> None:
    """Write a safetensors file (its format: 8 bytes of header length, a JSON header padded with spaces, the data)
    through a temporary one. Raises OSError, the old file being whole.

    The library would want all tensors in memory at once; a cache may be larger than that. Its header comes last, so
    the room for it is a guess that no cache exceeds.
    """
    for left in path.parent.glob(f".{path.name}.*"):  # by a process that was killed
        with suppress(FileNotFoundError):  # it was another's, who has just renamed it
            if left.stat().st_mtime < time() - 3600:
                left.unlink()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # only its owner may read it
    try:
        with os.fdopen(handle, "wb") as file:
            room, end, header = 2**16 + 2 * len(json.dumps(metadata)), 0, {"__metadata__": metadata}
            file.seek(8 + room)
            for name, tensor in tensors:
                start, end = end, end + tensor.nbytes
                header[name] = {
                    "dtype": STORED[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [start, end],
                }
                file.write(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy())
            file.seek(0)
            file.write(room.to_bytes(8, "little") + json.dumps(header).encode().ljust(room))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    if os.name == "posix":  # the new name itself is kept too
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
