"""Other engines on the same weights, prompts and threads: transformers, and llama.cpp with the GGUF file it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from statistics import median
from time import perf_counter

from measure.engines import ROOM, Subject

TRANSFORMERS = ("transformers-dynamic", "transformers-static")
# Row of the table -> how GGUF keeps the matrices (None: as they are stored), and our row of equal bytes a weight.
LLAMA_CPP = {
    "llama.cpp": (None, "contiguous"),
    "llama.cpp-q8_0": ("Q8_0", "int8-weights"),
    "llama.cpp-q4_1": ("Q4_1", "int4-weights"),
}


class PeerError(Exception):
    """A model that an engine cannot run; the text is one line."""


class Peer(ABC):
    """An engine that is stepped from here, with a cache for each length of prompt."""

    bytes_per_step: int  # of weights

    @classmethod
    @abstractmethod
    def prepare(cls, subject: Subject) -> None:
        """As ``engines.Ours.prepare``."""

    def answer(self, prompt: list[int], steps: int, anew: bool) -> dict[str, float]:
        """As ``engines.Ours.answer``."""
        length = len(prompt)
        held = 0 if anew else length - 1
        self.open(length, held)
        tokens, times = prompt[held:], []
        for _ in range(steps + 1):
            start = perf_counter()
            tokens = [self.feed(tokens)]
            times.append(perf_counter() - start)
        return {"first_s": times[0], "step_s": median(times[1:]), "bytes": self.bytes_per_step + self.cache_bytes()}

    @abstractmethod
    def open(self, length: int, held: int) -> None:
        """Go on with the cache for prompts of a length, of which it is to hold the first tokens."""

    @abstractmethod
    def feed(self, tokens: list[int]) -> int:
        """The likeliest token after those held and these, which it holds then; it is waited for."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes of K and V that a step reads."""


# ---- transformers


class Transformers(Peer):
    """Hugging Face transformers with its default cache, or with its static one, uncompiled."""

    @classmethod
    def prepare(cls, subject: Subject) -> None:
        from transformers import AutoModelForCausalLM  # noqa: F401
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __init__(self, row: str, subject: Subject):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        dtype = subject.dtype or "auto"
        if subject.config is None:
            model = AutoModelForCausalLM.from_pretrained(subject.weights, dtype=dtype).to(subject.device)
        else:
            config = AutoConfig.for_model(**subject.config)
            with torch.device(subject.device):
                model = AutoModelForCausalLM.from_config(config, dtype=subject.dtype or config.dtype)
        self.model, self.static, self.caches = model.eval(), row == "transformers-static", {}
        taken = signature(model.forward).parameters
        self.keyword = "cache" if "cache" in taken else "past_key_values"  # the older name
        tied = model.config.tie_word_embeddings
        unread = None if tied else model.get_input_embeddings().weight
        self.bytes_per_step = sum(parameter.nbytes for parameter in model.parameters() if parameter is not unread)

    def open(self, length: int, held: int) -> None:
        from transformers import DynamicCache, StaticCache

        if self.static:
            if length not in self.caches:
                self.caches[length] = StaticCache(config=self.model.config, max_cache_len=length + ROOM)
            for layer in self.caches[length].layers:  # what lies behind is masked, and written over
                layer.cumulative_length.fill_(held)
        elif not held:
            self.caches[length] = DynamicCache(config=self.model.config)
        else:
            self.caches[length].crop(held - self.caches[length].get_seq_length())
        self.cache = self.caches[length]

    def feed(self, tokens: list[int]) -> int:
        import torch

        ids = torch.tensor([tokens], device=self.model.device)
        with torch.inference_mode():
            out = self.model(ids, **{self.keyword: self.cache}, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1].argmax().item()

    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


# ---- llama.cpp


class LlamaCpp(Peer):
    """llama.cpp through the C API that llama-cpp-python carries, on a file of ``write_gguf``; cache in float16."""

    layouts = True  # whether it may keep quantized matrices as the processor's matrix units want them

    @classmethod
    def prepare(cls, subject: Subject) -> None:
        """Import it, and find out in a process apart whether its kernels for AMX crash, as they do when GCC 12 has
        compiled them: it then leaves bytes of the tiles' configuration unset that must be 0."""
        import logging
        import os

        import llama_cpp
        import numpy  # noqa: F401

        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
        llama_cpp.llama_backend_init()
        if not (child := os.fork()):
            cls("", subject).answer([1, 2], 1, True)
            os._exit(0)
        cls.layouts = os.waitpid(child, 0)[1] == 0

    def __init__(self, row: str, subject: Subject):
        import ctypes

        import llama_cpp

        self.api, self.threads, self.contexts = llama_cpp, subject.threads, {}
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers, params.use_extra_bufts = 0, self.layouts
        self.model = llama_cpp.llama_model_load_from_file(subject.weights.encode(), params)
        if not self.model:
            raise PeerError(f"{subject.weights}: llama.cpp does not load it")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        text = ctypes.create_string_buffer(32)
        llama_cpp.llama_model_meta_val_str(self.model, BYTES_PER_STEP.encode(), text, len(text))
        self.bytes_per_step = int(text.value)

    def open(self, length: int, held: int) -> None:
        if length not in self.contexts:
            params = self.api.llama_context_default_params()
            params.n_ctx = params.n_batch = length + ROOM
            params.n_threads = params.n_threads_batch = self.threads
            self.contexts[length] = self.api.llama_init_from_model(self.model, params)
        self.context = self.contexts[length]
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, held, -1)

    def logits(self, tokens: list[int]):
        """float32 [vocab_size] after the tokens held and these."""
        import numpy as np

        array = (self.api.llama_token * len(tokens))(*tokens)  # the batch points there and does not keep it
        if code := self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(tokens))):
            raise PeerError(f"llama_decode gave {code}")
        return np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, -1), (self.vocab_size,))

    def feed(self, tokens: list[int]) -> int:
        return int(self.logits(tokens).argmax())

    def cache_bytes(self) -> int:
        return self.api.llama_state_seq_get_size(self.context, 0)


BYTES_PER_STEP = "general.bytes_per_step"  # our own key


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write the weights of a model folder as a GGUF file without a tokenizer; ``kind``, a name of ggml's, is how it
    keeps the matrices. As in our int4, the head then has 8 bits. Raises PeerError and ModelError.

    The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; get.py reads it.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize
    from safetensors import safe_open

    from model import Checkpoint, Config
    from weights.get import CONFIG_KEYS, tensor_names

    config, checkpoint = Config.from_folder(folder), Checkpoint(folder)
    if config.model_type not in ("llama", "mistral") or any(config.windows):
        raise PeerError(f"llama.cpp is compared on models of type llama alone, and not on {config.model_type}")
    writer, read = GGUFWriter(path, "llama", use_temp_file=True), 0
    for key, name in CONFIG_KEYS.items():
        add = writer.add_float32 if name in ("rms_norm_eps", "rope_theta") else writer.add_uint32
        add(f"llama.{key}", getattr(config, name))
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    if (slower := rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", slower)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, stored in tensor_names(asdict(config)).items():
        with safe_open(checkpoint.tensors[stored][0], framework="pt") as file:
            values = file.get_tensor(stored).float().numpy()
        part = name.split(".")[-2]
        if part in heads:
            values = interleaved(values, heads[part])
        keep = "Q8_0" if kind == "Q4_1" and part in ("token_embd", "output") else kind
        if values.ndim == 1:
            keep = "F32"
        elif values.shape[1] % 32 and keep.startswith("Q"):
            keep = "F16"  # as it does not divide into blocks
        keep = GGMLQuantizationType[keep]
        values = quantize(values, keep)
        writer.add_tensor(name, values, raw_dtype=keep)
        read += values.nbytes if part != "token_embd" or config.tie_word_embeddings else 0
    writer.add_uint64(BYTES_PER_STEP, read)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(values, heads: int):
    """Rows [heads * D, …] in llama.cpp's order, the two of a rotated pair side by side; undoes ``get.half_split``."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def rope_factors(config):
    """How much slower each pair turns than by ``rope_theta`` alone, float32 [D/2], or None where none does. Raises
    PeerError for scalings that are more than that."""
    import torch

    from model import Rotary

    rotary = Rotary(config)
    if rotary.length != 1 or rotary.kind == "dynamic":
        raise PeerError(f"llama.cpp is not compared on rope_scaling of type {rotary.kind}")
    slower = 1.0 / config.rope_theta**rotary.exponents / rotary.frequencies
    return None if torch.allclose(slower, torch.ones(1)) else slower.numpy()
