"""One decode step as one CUDA graph, and the host a step behind it.

A step of a large model is a few hundred kernels of some microseconds. Asked for one by one from Python they take longer
to ask for than to run; captured once, they are replayed by one call (CUDA graphs; gpt-fast and nano-vllm show what it
brings). A graph repeats the same work on the same addresses, so whatever changes from step to step (the token, its
position, the length, the tokens seen) stands in tensors that stay where they are, and nothing inside depends on a value
that the host would have to know. The token that one replay draws is the one that the next takes in.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Graph:
    """A step of decoding over a ``FlashCache``: model and head for one token, and the draw of the next one. Captured at
    the first call, replayed at each.

    ``token`` [1] int64, on the device, is the one that goes in, and then the one that was drawn: so each replay goes on
    where the last one ended. It is -1 after numbers that are not finite, as ``sampler`` has it.
    """

    def __init__(self, model, cache, sampler):
        self.model, self.cache, self.sampler = model, cache, sampler
        self.token = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Tensor:
        """For a token by which the cache has been extended -> the logits that drew the next, [1, V] float32."""
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()
        return self._logits.clone()  # the next replay writes over them

    def _step(self) -> Tensor:
        logits = self.model.head(self.model(self.token.clamp(min=0), self.cache))  # -1 is no row of a table
        self.token.copy_(self.sampler.draw(logits[0]))
        return logits

    def _capture(self) -> torch.cuda.CUDAGraph:
        """What is run for it draws tokens, which are put back; k and v go to the slot that the first replay fills."""
        drawn, random = (self.token, self.sampler.seen), self.sampler.generator
        before, state = [x.clone() for x in drawn], random.get_state()
        here, aside = torch.cuda.current_stream(self.model.device), torch.cuda.Stream(self.model.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(2):  # kernels are compiled and libraries set themselves up, which no graph could hold
                self._step()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(random)  # so that each replay draws on from where it stands
        with torch.cuda.graph(graph, stream=aside):
            self._logits = self._step()
        for x, was in zip(drawn, before, strict=True):
            x.copy_(was)
        random.set_state(state)
        return graph


class Reading:
    """A number on its way from the device to the host, as it is now: waited for alone, and not with what the device was
    asked to do after it, which may write over it."""

    def __init__(self, number: Tensor):
        self._here = number.to("cpu", non_blocking=True, copy=True)  # from a GPU to pinned memory, or it would wait
        self._arrived = torch.cuda.Event() if number.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def value(self) -> int:
        if self._arrived:
            self._arrived.synchronize()
        return self._here.item()
