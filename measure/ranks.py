"""One model over several processes: what each of them holds, and what their sums take.

torchrun --nproc-per-node 3 bench.py --ranks
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import distributed

from cache import make
from generate import chunk_size, passes, synchronize
from measure.engines import ROOM, Subject
from measure.progress import progress, turn_of
from parallel import backend, load_part

PROMPT, STEPS = 512, 16


class Part:
    """One rank's part of a model. It counts the seconds that it spends in sums over ranks, waiting for the others among
    them; ``collectives`` of torch.distributed do so while it lives."""

    collectives = ("all_reduce", "all_gather")

    def __init__(self, subject: Subject):
        distributed.init_process_group(backend())
        self.model = load_part(subject.weights, subject.device, subject.dtype, None)
        config, device = self.model.config, self.model.device
        self.cache = make("contiguous", config, PROMPT + ROOM, device, self.model.dtype)
        self.tokens: list[int] = []
        self.summing_s = 0.0
        for name in self.collectives:
            setattr(distributed, name, self._timed(getattr(distributed, name)))

    def _timed(self, collective: Callable) -> Callable:
        def call(*args) -> None:
            synchronize(self.model.device)  # what was computed before is no part of it
            start = perf_counter()
            collective(*args)
            synchronize(self.model.device)
            self.summing_s += perf_counter() - start

        return call

    def read(self, prompt: list[int]) -> None:
        self.cache.truncate(0)
        self.tokens = list(prompt)
        self.step()

    def step(self) -> None:
        for hidden in passes(self.model, self.cache, self.tokens, chunk_size(self.model)):
            last = hidden[-1:]
        self.tokens.append(self.model.head(last).argmax().item())  # of logits that all ranks have

    def seconds(self, work: Callable[[], None]) -> tuple[float, float]:
        """Of ``work``, and those of them that went into sums over ranks."""
        start, before = perf_counter(), self.summing_s
        work()
        return perf_counter() - start, self.summing_s - before


def ranks(subject: Subject, rounds: int) -> list[dict[str, float]]:
    """For each rank: its bytes, and medians of a prompt of 512 and of the steps after it. Raises ModelError."""
    part, prompts, steps = Part(subject), [], []
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(part.model.config.vocab_size, (PROMPT,), generator=generator).tolist()
    for turn in range(rounds):
        if distributed.get_rank() == 0:
            progress(turn_of(turn + 1, rounds))
        prompts.append(part.seconds(lambda: part.read(prompt)))
        steps += [part.seconds(part.step) for _ in range(STEPS)]
    figures = {
        "weights": sum(parameter.nbytes for parameter in part.model.parameters()),
        "cache": part.cache.bytes_reserved,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }
    for name, taken in {"prompt": prompts, "step": steps}.items():
        whole, summing = zip(*taken, strict=True)
        figures |= {f"{name}_s": median(whole), f"{name}_summing_s": median(summing)}
    mine = torch.tensor(list(figures.values()), dtype=torch.float64, device=part.model.device)
    of_all = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(of_all, mine)
    distributed.destroy_process_group()
    return [dict(zip(figures, values.tolist(), strict=True)) for values in of_all]


def print_ranks(result: list[dict[str, float]]) -> None:
    print(
        f"| rank | weights | cache of {PROMPT + ROOM} | peak memory | prefill, of it in sums | decode, of it in sums |"
    )
    print("|---|---|---|---|---|---|")
    for rank, row in enumerate(result):
        cells = [f"{row[name] / 2**20:.1f} MiB" for name in ("weights", "cache", "peak")]
        for name, tokens in {"prompt": PROMPT, "step": 1}.items():
            cells.append(f"{tokens / row[f'{name}_s']:.1f} tok/s, {row[f'{name}_summing_s'] / row[f'{name}_s']:.0%}")
        print(f"| {rank} | {' | '.join(cells)} |")
