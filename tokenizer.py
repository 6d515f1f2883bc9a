"""Text to token ids and back, chat templates, and decoding a stream.

Two ideas carry this file. A token is a string of bytes, and text is the UTF-8 of those bytes joined: so a stream is
decoded byte by byte, in linear time, and shows only whole characters. And what a person types is text, never control:
the tokenizer in use knows its control tokens under secret names, which only the template's own words are translated
to.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path


class TokenizerError(Exception):
    """A tokenizer or a template that cannot be used; the text is one line that names the file or the reason."""


class Stream:
    """Decodes ids one at a time. The pieces, and what ``flush`` returns at the end, join to ``Tokenizer.decode`` of
    all ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._pieces, self._strip = tokenizer.piece, tokenizer.strips_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The text that is certain now; bytes of a character that is not complete yet are kept for later."""
        piece = self._pieces(token)
        if self._strip and piece:
            self._strip, piece = False, piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What an incomplete character at the end decodes to."""
        return self._decoder.decode(b"", final=True)

    @property
    def pending(self) -> bool:
        """Whether some bytes wait for the rest of their character."""
        return bool(self._decoder.getstate()[0])


class Tokenizer:
    """Encodes, decodes and renders chats as one model folder says.

    ``stop_ids`` are the ids that end an answer, by config.json, generation_config.json, tokenizer_config.json or the
    chat template.
    """

    def __init__(
        self, backend: JsonBackend | SentencePieceBackend, config: dict, template: str | None, stop_ids: set[int]
    ):
        self._backend, self._config, self._template = backend, config, template
        self._nonce = secrets.token_hex(8)
        self.piece, self.strips_first_space = backend.piece, backend.strips_first_space
        names = sorted(backend.control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.stop_ids = stop_ids | self._template_stop()

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` or else ``tokenizer.model``, with the configs and the chat template beside it.

        Raises TokenizerError when there is neither, or one is damaged.
        """
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json", optional=True)
        if (folder / "tokenizer.json").exists():
            backend = JsonBackend(folder / "tokenizer.json")
        elif (folder / "tokenizer.model").exists():
            backend = SentencePieceBackend(folder / "tokenizer.model", config)
        else:
            raise TokenizerError(f"{folder}: no tokenizer.json and no tokenizer.model; a model folder needs one")
        stops = set()
        for name in ("config.json", "generation_config.json"):
            ids = _read_json(folder / name, optional=True).get("eos_token_id")
            stops |= {i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int}
        eos = backend.control.get(_content(config.get("eos_token")))
        return cls(backend, config, _find_template(folder, config), stops | ({eos} - {None}))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the BOS or EOS that the tokenizer's own settings add. No text becomes a control
        token."""
        return self._backend.encode(_clean(text))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; control tokens and ids that do not exist have none. Linear in their number."""
        stream = Stream(self)
        return "".join([*map(stream.add, ids), stream.flush()])

    def chat(self, messages: list[dict]) -> list[int]:
        """Ids of a conversation [{"role": …, "content": …}, …] in the model's chat template, ready for the answer.

        Raises TokenizerError with the template's own words when it refuses the conversation, or when there is no
        template.
        """
        return self._encode_rendered(self._render(messages, add_generation_prompt=True))

    # ---- templates

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        """The template's text, in which each control token's name that stands in a message bears the nonce."""
        from jinja2 import TemplateError

        if self._template is None:
            raise TokenizerError("this model has no chat template; use --raw")
        marked = [{**m, "content": self._control.sub(self._disguise, _clean(m["content"]))} for m in messages]
        special = {name: _content(value) for name, value in self._config.items() if name.endswith("_token")}
        try:
            return self._compiled.render(
                special, messages=marked, tools=None, documents=None, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise TokenizerError(f"the chat template refuses this conversation: {error.message}") from None
        except Exception as error:  # a template is a program of someone else's and may fail in any way
            raise TokenizerError(f"the chat template fails: {type(error).__name__}: {error}") from None

    @cached_property
    def _compiled(self):
        from jinja2 import TemplateError

        try:
            return _environment().from_string(self._template)
        except (TemplateError, RecursionError) as error:
            raise TokenizerError(f"the chat template cannot be read: {error}") from None

    def _disguise(self, match: re.Match) -> str:
        return f"{self._nonce}{match.group().encode().hex()}:"

    def _encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered template: what is still a control token's name is one, and what was disguised is text."""
        disguised = re.compile(f"{self._nonce}([0-9a-f]+):")
        parts, end = [], 0
        for match in [*self._control.finditer(text), None]:
            plain = text[end : match.start() if match else None]
            parts.append(disguised.sub(lambda hidden: bytes.fromhex(hidden[1]).decode(), plain))
            if match:
                parts.append(self._backend.control[match.group()])
                end = match.end()
        return self._backend.encode_parts(parts)

    def _template_stop(self) -> set[int]:
        """The control token with which the template ends an answer, if it does."""
        if self._template is None:
            return set()
        mark = secrets.token_hex(8)
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        try:
            after = self._render(chat, add_generation_prompt=False).partition(mark)[2].lstrip()
        except TokenizerError:
            return set()  # said when the template is used in earnest
        match = self._control.match(after)
        return {self._backend.control[match.group()]} if match else set()


def _environment():
    """Jinja as chat templates expect it: sandboxed, with the names and tags that Hugging Face templates use.

    https://huggingface.co/docs/transformers/chat_templating_writing
    """
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """{% generation %} … {% endgeneration %} marks the answer for training; here its body is all that counts."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def raise_exception(message):
        raise TemplateError(message)

    def strftime_now(form):
        from datetime import datetime

        return datetime.now().strftime(form)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


def _find_template(folder: Path, config: dict) -> str | None:
    """The chat template of a folder: a file of its own, or in tokenizer_config.json, there perhaps one of several."""
    try:
        return (folder / "chat_template.jinja").read_text("utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{folder / 'chat_template.jinja'}: cannot be read ({error})") from None
    found = _read_json(folder / "chat_template.json", optional=True).get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


# ---- backends


class JsonBackend:
    """``tokenizer.json``, by the tokenizers library, with its added tokens renamed so that no text can spell them.

    control: name -> id of every added token, special or not.
    """

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Engine

        raw = _read_json(path)
        try:
            added = {token["id"]: token for token in raw["added_tokens"]}
            self.control = {token["content"]: i for i, token in added.items()}
            self._texts = {i: b"" if token["special"] else token["content"].encode() for i, token in added.items()}
            nonce = secrets.token_hex(8)
            # Private-use characters around the name: no normalizer changes them and no word touches them.
            self._secret = {i: f"\ue000{nonce}{i}\ue001" for i in added}
            _rename(raw, self.control, self._secret)
            self._engine = Engine.from_str(json.dumps(raw))
        except Exception as error:  # tokenizers raises nothing narrower
            raise TokenizerError(f"{path}: not a usable tokenizer ({type(error).__name__}: {error})") from None
        self._engine.no_truncation()
        self._engine.no_padding()
        kinds = set(_types(raw.get("decoder")))
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"Metaspace", "ByteFallback", "Replace"}:
            raise TokenizerError(
                f"{path}: decoder {sorted(kinds)} is not supported; supported: byte level, sentencepiece's"
            )
        self.strips_first_space = bool(kinds & {"Strip", "Metaspace"})

    def encode(self, text: str) -> list[int]:
        return self._engine.encode(text).ids

    def encode_parts(self, parts: list[str | int]) -> list[int]:
        """Ids of texts and control tokens in a row, nothing added."""
        text = "".join(self._secret[part] if isinstance(part, int) else part for part in parts)
        return self._engine.encode(text, add_special_tokens=False).ids

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; none for control tokens and for ids that do not exist."""
        if token in self._texts:
            return self._texts[token]
        name = self._engine.id_to_token(token)
        if name is None:
            return b""
        if self._byte_level:
            return bytes(BYTE_OF[c] for c in name) if BYTE_OF.keys() >= set(name) else name.encode()
        return _sentencepiece_bytes(name)


def _rename(raw: dict, control: dict[str, int], secret: dict[int, str]) -> None:
    """Put the secret names into a parsed tokenizer.json, wherever a name stands for its id."""
    for token in raw["added_tokens"]:
        token["content"] = secret[token["id"]]
    model = raw["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {secret.get(i, name) if name in control else name: i for name, i in model["vocab"].items()}
    else:
        model["vocab"] = [[secret.get(i, name), score] for i, (name, score) in enumerate(model["vocab"])]
    if model.get("unk_token") in control:
        model["unk_token"] = secret[control[model["unk_token"]]]


def _types(decoder: dict | None) -> Iterable[str]:
    """The types in a decoder, those inside a sequence too."""
    if decoder:
        yield decoder.get("type", "")
        for inner in decoder.get("decoders", ()):
            yield from _types(inner)


class SentencePieceBackend:
    """``tokenizer.model``, by the sentencepiece library; control tokens are those of the model and of
    tokenizer_config.json."""

    strips_first_space = True

    def __init__(self, path: Path, config: dict):
        from sentencepiece import SentencePieceProcessor

        try:
            self._first, self._later = (SentencePieceProcessor(model_file=str(path)) for _ in range(2))
        except (RuntimeError, OSError) as error:
            raise TokenizerError(f"{path}: not a sentencepiece model ({error})") from None
        if config.get("legacy", True) is False:
            # Only the text at the very start gets sentencepiece's leading space; in the older way each text after a
            # control token does.
            self._later.override_normalizer_spec(add_dummy_prefix=False)
        engine = self._first
        ids = range(engine.get_piece_size())
        self.control = {engine.id_to_piece(i): i for i in ids if engine.is_control(i) or engine.is_unknown(i)}
        added = config.get("added_tokens_decoder") or {}
        self.control |= {token["content"]: int(i) for i, token in added.items()}
        self._texts = dict.fromkeys(self.control.values(), b"")
        self._texts |= {int(i): token["content"].encode() for i, token in added.items() if not token.get("special")}
        self._bos = [engine.bos_id()] if config.get("add_bos_token", True) and engine.bos_id() >= 0 else []
        self._eos = [engine.eos_id()] if config.get("add_eos_token", False) and engine.eos_id() >= 0 else []

    def encode(self, text: str) -> list[int]:
        return [*self._bos, *self._first.encode(text), *self._eos]

    def encode_parts(self, parts: list[str | int]) -> list[int]:
        """Ids of texts and control tokens in a row, nothing added."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += (self._later if ids else self._first).encode(part)
        return ids

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; none for control tokens and for ids that do not exist."""
        if token in self._texts:
            return self._texts[token]
        return _sentencepiece_bytes(self._first.id_to_piece(token)) if token < self._first.get_piece_size() else b""


def _sentencepiece_bytes(name: str) -> bytes:
    """What a sentencepiece token stands for: one byte for <0x41>, else its text, in which ▁ is a space."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", name):
        return bytes([int(name[3:5], 16)])
    return name.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from 256 on
    (GPT-2)."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


# ---- reading


def _read_json(path: Path, optional: bool = False) -> dict:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise TokenizerError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return value


def _content(token: str | dict | None) -> str | None:
    """The text of a token that a config names, which may be a string or an object."""
    return token.get("content") if isinstance(token, dict) else token


def _clean(text: str) -> str:
    """Text without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
