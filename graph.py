"""One decode step as one CUDA graph, and the host a step behind it.

A step of a large model is a few hundred kernels of some microseconds. Asked for one by one from Python they take longer
to ask for than to run; captured once, they are replayed by one call (CUDA graphs; gpt-fast and nano-vllm show what it
brings). A graph repeats the same work on the same addresses, so whatever changes from step to step (the token, its
position, the length) stands in tensors that stay where they are, and nothing inside depends on a value that the host
would have to know.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Graph:
    """``model`` and ``head`` for one token over a ``FlashCache``: captured at the first call, replayed at each."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache
        self.token = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, token: Tensor) -> Tensor:
        """token [1] int64, on the device, for which the cache has been extended -> logits [1, V] float32."""
        torch.clamp(token, min=0, out=self.token)  # -1 stands for numbers that overflowed, and is no row of a table
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()
        return self._logits.clone()  # the next replay writes over them

    def _step(self) -> Tensor:
        return self.model.head(self.model(self.token, self.cache))

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Each run stores the same k and v in the same slot, so it does not matter how many there are."""
        here, aside = torch.cuda.current_stream(self.model.device), torch.cuda.Stream(self.model.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(2):  # kernels are compiled and libraries set themselves up, which no graph could hold
                self._step()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=aside):
            self._logits = self._step()
        return graph


class Reading:
    """A number on its way from the device to the host: waited for alone, and not with what the device was asked to do
    after it."""

    def __init__(self, number: Tensor):
        self._here = number.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if number.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def value(self) -> int:
        if self._arrived:
            self._arrived.synchronize()
        return self._here.item()
