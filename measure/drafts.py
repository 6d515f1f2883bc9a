"""The same answers with drafts and without: what prompt lookup gains where a text comes again, and costs elsewhere."""

from __future__ import annotations

from itertools import zip_longest
from statistics import median

from measure.engines import Subject
from measure.progress import progress, turn_of

ANSWER = 160  # tokens, at most

OPENING = "The harbour wakes before the sun does."
TEXT = (
    "Boats come in with the night's catch, gulls quarrel over what falls, and the first carts rattle down to the quay. "
    "By noon all of it is sold, and the town smells of salt and tar. In the afternoon the nets are mended. Old men sit "
    "on the wall and tell the young ones where the herring used to be, and the young ones nod and go where the herring "
    "are now. At night the lighthouse turns, and whoever cannot sleep counts the seconds until its beam comes again."
)
FILE = '''class Room:
    """A room that wants a carpet."""

    def __init__(self, name, width, height):
        self.name, self.width, self.height = name, width, height

    def area(self):
        """Square metres."""
        return self.width * self.height

    def price(self):
        """What a carpet for this room costs."""
        return self.area() * RATE

    def offer(self):
        """A line for the customer."""
        return f"{self.name}: {self.price():.2f} euros"
'''

# Kind of text -> what asks for it, and how the answer begins: a small model might not get so far by itself.
ASKED = {
    "repeat a text": (f"Repeat this text word for word: {OPENING} {TEXT}", OPENING),
    "edit a file": (
        f"Change RATE to 24.9 in this file:\n\n```python\nRATE = 19.5\n\n{FILE}```",
        "```python\nRATE = 24.9",
    ),
    "story": ("Tell a story about a fox who learns to read.", ""),
    "essay": ("Write an essay about the history of the printing press.", ""),
}


def drafts(subject: Subject, rounds: int) -> dict[str, dict]:
    """What ``compared`` says of each kind of text, after a warm-up and ``rounds`` pairs of greedy answers.

    Raises ModelError, NotFinite, TokenizerError, CacheFull where the context is too short for a question, and
    ValueError for an answer that ends at once.
    """
    from cache import make
    from generate import Drafts, Session
    from speculate import Lookup
    from tokenizer import Tokenizer

    model, tokenizer = subject.model(), Tokenizer.from_folder(subject.weights)
    prompts = {
        kind: tokenizer.chat([{"role": "user", "content": asked}], begun) for kind, (asked, begun) in ASKED.items()
    }
    context = min(model.config.max_position_embeddings, max(map(len, prompts.values())) + ANSWER)
    session = Session(model, make("contiguous", model.config, context, model.device, model.dtype), tokenizer)
    ways, pairs = [Drafts(), Lookup()], {kind: [] for kind in prompts}
    for turn in range(rounds + 1):
        order = (-1) ** turn  # neither way is always the second
        for kind, prompt in prompts.items():
            progress(f"{turn_of(turn, rounds)}: {kind}")
            pair = [answer(session, prompt, way) for way in ways[::order]][::order]
            pairs[kind] += [pair] if turn else []
    return {kind: compared(found) for kind, found in pairs.items()}


def answer(session, prompt: list[int], way) -> dict:
    """The tokens of an answer, tokens per second after the first, and how many were drafted and accepted."""
    from generate import Sampling

    session.drafts = way
    session.hold([])  # the prompt's last token, read alone, would round otherwise than among the others
    tokens = [step.token for step in session.generate(prompt, Sampling(temperature=0, max_tokens=ANSWER))]
    turn = session.last
    if not turn.decode_tokens:
        raise ValueError("an answer ends at once, and there is nothing to time")
    counts = {"drafted": turn.drafted_tokens, "accepted": turn.accepted_tokens}
    return {"tokens": tokens, "tok_s": turn.decode_tok_s} | counts


def compared(pairs: list[list[dict]]) -> dict:
    """Of pairs of answers without drafts and with them: medians of tokens per second and of the ratios within a pair,
    the least and the most of these; drafted and accepted tokens of all; and the first token, counted from 1, that is
    another or missing in any pair, or None."""
    plain, drafted = zip(*pairs, strict=True)
    ratios = [b["tok_s"] / a["tok_s"] for a, b in pairs]
    both = [enumerate(zip_longest(a["tokens"], b["tokens"]), 1) for a, b in pairs]
    return {
        "tokens": len(plain[0]["tokens"]),
        "without_tok_s": median(found["tok_s"] for found in plain),
        "with_tok_s": median(found["tok_s"] for found in drafted),
        "ratio": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "drafted": sum(found["drafted"] for found in drafted),
        "accepted": sum(found["accepted"] for found in drafted),
        "differs_at": min((place for tokens in both for place, (a, b) in tokens if a != b), default=None),
    }


def print_drafts(result: dict[str, dict]) -> None:
    print("| text | tokens | tok/s without drafts | with | ratio | drafted tokens accepted | the same answer |")
    print("|---|---|---|---|---|---|---|")
    for kind, row in result.items():
        speeds = f"{row['without_tok_s']:.1f} | {row['with_tok_s']:.1f}"
        ratio = f"{row['ratio']:.2f} × ({row['least']:.2f} to {row['most']:.2f})"
        share = f"{row['accepted'] / row['drafted']:.0%} of {row['drafted']}" if row["drafted"] else "none drafted"
        same = f"not from token {row['differs_at']} on" if row["differs_at"] else "yes"
        print(f"| {kind} | {row['tokens']} | {speeds} | {ratio} | {share} | {same} |")
