"""The real default model against transformers, in float32: the same logits, and the same tokens."""

import pytest
import torch

from cache import make
from generate import Sampling, Session
from model import load
from tokenizer import Tokenizer

TEXT = """The cache holds the keys and the values of every token that was read so far. A new token brings one query, one
key and one value for each layer; its query meets all keys, and what it finds there weighs the values. Nothing
of the older tokens has to be computed again, since no later token can change what an earlier one has said. That
is why a model that writes a word at a time can be fast, and why a long conversation costs memory: 22.5 KiB for
each token of this small model, and 128 KiB for each token of one with eight billion parameters. Café, naïve,
東京, 🎉 and 3.14159 are in here so that the bytes are mixed."""

QUESTIONS = [
    "What is a KV cache? Answer in two sentences.",
    "Name three primary colours.",
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Count from 1 to 10.",
    "Write a Python function that adds two numbers.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "List the days of the week.",
    "Tell me a story about a fox.",
]


@pytest.fixture(scope="module")
def ours(default_model):
    return load(default_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def theirs(default_model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return Tokenizer.from_folder(default_model)


@torch.inference_mode()
def test_logits_at_every_position_of_200_tokens_are_those_of_transformers(ours, theirs, tokenizer):
    tokens = tokenizer.encode(TEXT * 2)[:200]
    assert len(tokens) == 200
    cache, logits = make("contiguous", ours.config, 200), []
    for start, end in ((0, 64), (64, 101), (101, 102), (102, 200)):
        cache.extend(end - start)
        logits.append(ours.head(ours(torch.tensor(tokens[start:end]), cache)))
    expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-3, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_answers_are_those_of_transformers_token_for_token(question, ours, theirs, tokenizer):
    """64 tokens, each the likeliest by transformers after the ones before it: what its own greedy answer is made of."""
    prompt = tokenizer.chat([{"role": "user", "content": question}])
    session = Session(ours, make("contiguous", ours.config, 256), tokenizer)
    tokenizer.stop_ids = set()  # go on past the end of the answer: 64 tokens of each
    answer = [step.token for step in session.generate(prompt, Sampling(temperature=0, max_tokens=64))]
    logits = theirs(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    assert len(answer) == 64
    assert answer == logits.argmax(-1).tolist()


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_two_threads_compute_the_logits_of_one(quantize, default_model, tokenizer):
    """Of 40 tokens at once and of a step."""
    model, tokens, logits = load(default_model, quantize=quantize), torch.tensor(tokenizer.encode(TEXT)[:41]), []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        cache, parts = make("contiguous", model.config, 41, dtype=model.dtype), []
        for part in tokens.split(40):
            cache.extend(len(part))
            parts.append(model.head(model(part, cache)))
        logits.append(torch.cat(parts))
    torch.set_num_threads(before)
    torch.testing.assert_close(*logits, atol=0.1, rtol=0)


def test_the_stored_16_bits_answer_like_float32(default_model, ours, tokenizer):
    """The default arithmetic against float32: argmax after each token of a text, all but near-ties."""
    half = load(default_model)
    assert half.dtype is torch.float16
    tokens, logits = torch.tensor(tokenizer.encode(TEXT)), []
    for model in (half, ours):
        cache = make("contiguous", model.config, len(tokens), dtype=model.dtype)
        cache.extend(len(tokens))
        logits.append(model.head(model(tokens, cache)))
    assert (logits[0] - logits[1]).abs().max() < 0.5
    assert (logits[0] - logits[1]).abs().mean() < 0.03
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean() > 0.97


def test_quantized_caches_keep_the_perplexity_of_a_text(default_model, tokenizer):
    """On the first 512 tokens of what bench.py --caches reads; the promise for all of it is 0.1 % and 2 %."""
    from torch.nn.functional import cross_entropy

    from measure.compare import read_through, text_ids

    half, ids = load(default_model), text_ids(tokenizer, 512)

    def loss(kind):
        logits = read_through(half, make(kind, half.config, 512, dtype=half.dtype), ids)
        return cross_entropy(logits, torch.tensor(ids[1:])).item()

    whole, int8, int4 = map(loss, ("contiguous", "int8", "int4"))
    assert int8 == pytest.approx(whole, abs=0.001)
    assert int4 == pytest.approx(whole, abs=0.02)
    assert int4 != whole
