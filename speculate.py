"""Drafts: guesses at the next tokens, which the model judges in one pass (speculative decoding, arXiv 2211.17192).

A pass over four tokens reads the same weights as a pass over one, and takes little longer. So a draft is appended to
the last token, and each row of logits draws the token that it would have drawn anyway; as long as that is the drafted
one, the next row is right too. The answer is the same with a draft and without one, sampled ones included: only the
number of passes differs.
(That is so in exact arithmetic, and in float32 in practice. In 16 bits sums that are taken together round otherwise,
and a quantized cache settles its groups by the pass.)
"""

from __future__ import annotations

from generate import Drafts, NotFinite, Sampling, Session

MOST = 15  # tokens of a draft


class Lookup(Drafts):
    """Drafts what followed when the last three tokens stood there before (prompt lookup, Saxena 2023): a quotation, a
    file that is edited, a list. Where that misses it falls silent for a while, longer each time, so that other text
    costs next to nothing."""

    SPAN, LONGEST_PAUSE = 3, 64

    def begin(self, tokens: list[int]) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # where the newest place after such tokens is
        self._known, self._length, self._pause, self._silent = self.SPAN, 3, 1, 0

    def propose(self, tokens: list[int], most: int) -> list[int]:
        for place in range(self._known, len(tokens)):
            self._after[tuple(tokens[place - self.SPAN : place])] = place
        self._known = max(self._known, len(tokens))
        if self._silent:
            self._silent -= 1
            return []
        place = self._after.get(tuple(tokens[-self.SPAN :]), len(tokens))
        return tokens[place : place + min(most, self._length)]

    def judge(self, proposed: int, accepted: int) -> None:
        if accepted:
            self._pause, self._length = 1, min(MOST, 2 * accepted + 1)
        else:
            self._silent, self._pause = self._pause, min(2 * self._pause, self.LONGEST_PAUSE)


class DraftModel(Drafts):
    """Drafts the likeliest answer of a smaller model with the same vocabulary, which has a session of its own."""

    def __init__(self, session: Session):
        self.session, self._length = session, 4

    def propose(self, tokens: list[int], most: int) -> list[int]:
        if len(tokens) >= self.session.cache.longest:
            return []
        sampling = Sampling(temperature=0, max_tokens=min(most, self._length))
        try:
            return [step.token for step in self.session.generate(tokens, sampling)]
        except NotFinite:  # its trouble is not the model's
            return []

    def judge(self, proposed: int, accepted: int) -> None:
        self._length = min(MOST, self._length + 1) if accepted == proposed else max(1, accepted)
