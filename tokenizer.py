"""Text to token ids and back, chat templates, and decoding a stream.

Two ideas carry this file. A token is a string of bytes, and text is the UTF-8 of those bytes joined: so a stream is
decoded byte by byte, in linear time, and shows only whole characters. And what a person types is text, never control:
the tokenizer in use knows no control token by its name, and only the template's own words are translated to one.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

# For folders without a chat template: base models go on from it, and older chat models mostly know something like it.
PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOP = "\nUser:"  # where a model begins to speak for the person

MARK = "\ud800"  # a lone surrogate: no text that is clean has one, so nobody can write it


class TokenizerError(Exception):
    """A tokenizer or a template that cannot be used; the text is one line that names the file or the reason."""

    def __init__(self, text: str):
        super().__init__(" ".join(text.replace(MARK, "").split()))


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
        self._backend, self._config = backend, config
        self.has_template, self._template = template is not None, template or PLAIN
        self.piece, self.strips_first_space = backend.piece, backend.strips_first_space
        names = sorted(filter(None, backend.control), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names)) or "(?!)")
        # Where a name begins with a sign, all such signs are marked: a template may delete or change letters of a
        # message, and so make a name of what was none.
        starts = sorted({name[0] if not name[0].isalnum() else name for name in names}, key=len, reverse=True)
        self._starts = re.compile("|".join(map(re.escape, starts)) or "(?!)")
        self.stop_ids = stop_ids | self._template_stop()

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` or else ``tokenizer.model``, with the configs and the chat template beside it.

        Raises TokenizerError when there is neither, or one is damaged.
        """
        folder = Path(folder)
        config = {
            **_read_json(folder / "special_tokens_map.json", optional=True),
            **_read_json(folder / "tokenizer_config.json", optional=True),
        }
        if (folder / "tokenizer.json").exists():
            backend = JsonBackend(folder / "tokenizer.json")
        elif (folder / "tokenizer.model").exists():
            added = _read_json(folder / "added_tokens.json", optional=True)
            backend = SentencePieceBackend(folder / "tokenizer.model", config, added)
            config = {**backend.names, **config}
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

    def control_name(self, token: int) -> str:
        """What a control token is called; empty for any other."""
        return next((name for name, i in self._backend.control.items() if i == token), "")

    def chat(self, messages: list[dict], begun: str = "") -> list[int]:
        """Ids of a conversation [{"role": …, "content": …}, …] in the model's chat template, ready for the answer, or
        for the rest of one that has ``begun``.

        A folder without a template (``has_template`` is False) gets a plain one, "User: … Assistant:". Raises
        TokenizerError with the template's own words when it refuses the conversation.
        """
        ids = self._encode_rendered(self._render(messages, add_generation_prompt=True) + self._mark(begun))
        return ids if self.has_template else self._backend.begin(ids)

    # ---- templates

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        """The template's text, in which MARK stands before whatever in a message may begin a control token's name."""
        template, marked = self._compiled, [*map(self._marked, messages)]
        special = {
            k: name for k, v in self._config.items() if k.endswith("_token") and (name := _content(v)) is not None
        }
        try:
            return template.render(
                special, messages=marked, tools=None, documents=None, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program of someone else's and may fail in any way
            words = getattr(error, "message", None) or repr(error)  # its own, if it raised them
            raise TokenizerError(f"the chat template refuses this conversation: {words}") from None

    @cached_property
    def _compiled(self):
        with _told("the chat template cannot be read"):
            return _environment().from_string(self._template)

    def _marked(self, message: dict) -> dict:
        """A message with its marks. Raises TokenizerError for one that is not all text."""
        fields = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        if not fields.keys() >= {"role", "content"} or not all(isinstance(v, str) for kv in fields.items() for v in kv):
            raise TokenizerError("a message needs a role and a content, and all its fields must be text")
        return dict([self._mark(text) for text in pair] for pair in fields.items())

    def _mark(self, text: str) -> str:
        return self._starts.sub(rf"{MARK}\g<0>", _clean(text))

    def _encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered template: a control token's name is one, unless a mark says that it is a message's."""
        parts, start = [], 0
        for match in self._control.finditer(text):
            if not text.startswith(MARK, match.start() - 1):
                parts += [text[start : match.start()].replace(MARK, ""), self._backend.control[match[0]]]
                start = match.end()
        return self._backend.encode_parts([*parts, text[start:].replace(MARK, "")])

    def _template_stop(self) -> set[int]:
        """The control token with which the template ends an answer, if it does."""
        if not self.has_template:
            return set()
        mark = secrets.token_hex(8)
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        try:
            after = self._render(chat, add_generation_prompt=False).partition(mark)[2].lstrip()
        except TokenizerError:
            return set()  # said when the template is used in earnest
        match = self._control.match(after)
        return {self._backend.control[match[0]]} if match else set()


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
    own = folder / "chat_template.jinja"
    with _told(f"{own}: cannot be read"):
        if own.exists():
            return own.read_text("utf-8")
    found = _read_json(folder / "chat_template.json", optional=True).get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        named = [entry.get("template") for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[0] if named else None
    return found if isinstance(found, str) else None


# ---- backends


class JsonBackend:
    """``tokenizer.json``, by the tokenizers library, with its control tokens renamed so that no text can spell them;
    ``control`` has their ids by name."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Engine

        raw, self._path = _read_json(path), path
        with _told(f"{path}: not a usable tokenizer"):
            kinds = set(_types(raw.get("decoder")))
            self._byte_level = "ByteLevel" in kinds
            self.strips_first_space = bool(kinds & {"Strip", "Metaspace"})
            added, plain = raw["added_tokens"], str.encode if self._byte_level else _sentencepiece_bytes
            self._texts = {token["id"]: b"" if token["special"] else plain(token["content"]) for token in added}
            self.control = {token["content"]: token["id"] for token in added if _is_control(token)}
            # Private-use characters around the name: no normalizer changes them and no word touches them.
            self._secret = {i: f"\ue000{secrets.token_hex(8)}\ue001" for i in self.control.values()}
            _rename(raw, self.control, self._secret)
            self._engine = Engine.from_str(json.dumps(raw | {"truncation": None, "padding": None}))
        if not self._byte_level and not kinds & {"Metaspace", "ByteFallback", "Replace"}:
            raise TokenizerError(f"{path}: its decoder, {sorted(kinds)}, is neither byte-level nor sentencepiece's")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with _told(f"{self._path}: not a usable tokenizer"):
            return self._engine.encode(text, add_special_tokens=add_special_tokens).ids

    def begin(self, ids: list[int]) -> list[int]:
        """``ids`` behind the BOS, if the tokenizer's own settings add one."""
        whole, bare = self.encode("a"), self.encode("a", add_special_tokens=False)
        return whole[: next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)] + ids

    def encode_parts(self, parts: list[str | int]) -> list[int]:
        """Ids of texts and control tokens in a row, nothing added."""
        text = "".join(self._secret[part] if isinstance(part, int) else part for part in parts)
        return self.encode(text, add_special_tokens=False)

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; none for control tokens and for ids that do not exist."""
        if token in self._texts:
            return self._texts[token]
        name = self._engine.id_to_token(token) if 0 <= token < 1 << 32 else None
        if name is None:
            return b""
        if self._byte_level:
            return bytes(BYTE_OF[c] for c in name) if BYTE_OF.keys() >= set(name) else name.encode()
        return _sentencepiece_bytes(name)


def _is_control(token: dict) -> bool:
    """Whether an added token is control: flagged as special, or markup. Single characters (deepseek-coder), words and
    runs of spaces (GPT-NeoX) are added too, and those are text."""
    name = token["content"]
    return bool((len(name) > 1 and re.search(r"[^\w\s▁]", name)) or token.get("special"))


def _rename(raw: dict, control: dict[str, int], secret: dict[int, str]) -> None:
    """Put the secret names into a parsed tokenizer.json, wherever a name stands for its id."""
    for token in raw["added_tokens"]:
        if token["id"] in secret:  # not normalized, lest Llama's normalizer put a space before the name
            token |= {"content": secret[token["id"]], "normalized": False}
    model = raw["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {secret.get(i, name) if name in control else name: i for name, i in model["vocab"].items()}
    else:
        model["vocab"] = [[secret.get(i, name), score] for i, (name, score) in enumerate(model["vocab"])]
    if model.get("unk_token") in control:
        model["unk_token"] = secret[control[model["unk_token"]]]
    if model.get("merges"):  # no pieces may merge to a control token
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if not (a in control or b in control or a + b in control)]


def _types(decoder: dict | None) -> Iterable[str]:
    """The types in a decoder, those inside a sequence too."""
    if decoder:
        # A Metaspace for text without a leading space only replaces.
        yield "Replace" if decoder.get("prepend_scheme") == "never" else decoder["type"]
        for inner in decoder.get("decoders", ()):
            yield from _types(inner)


class SentencePieceBackend:
    """``tokenizer.model``, by the sentencepiece library; control tokens are those of the model and of
    tokenizer_config.json, and markup that the model defines as a piece of its own."""

    def __init__(self, path: Path, config: dict, more: dict):
        from sentencepiece import SentencePieceProcessor as Engine

        with _told(f"{path}: not a usable tokenizer"):
            model = path.read_bytes()
            if re.match(rb"[\w+/]+=* \d+\n", model):
                raise TokenizerError(
                    f"{path}: in tiktoken's format, as Llama 3 came at first; get the tokenizer.json instead"
                )
            # In protobuf what is appended wins: this is normalizer_spec.add_dummy_prefix = false.
            engine, bare = Engine(model_proto=model), Engine(model_proto=model + b"\x1a\x02\x18\x00")
            # A piece is its name, score and type, of which 4 is user-defined.
            defined = re.findall(rb"\n.\n.([^\x15]+)\x15.{4}\x18\x04", model, re.DOTALL)
            added = {engine.piece_to_id(name): {"content": name} for name in map(bytes.decode, defined)}
            added |= {int(i): {"content": name, "special": True} for name, i in more.items()}  # added_tokens.json
            added |= {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()}
            ids = range(engine.get_piece_size())
            names = {i: engine.id_to_piece(i) for i in ids} | {i: token["content"] for i, token in added.items()}
            hidden = [i for i in ids if engine.is_control(i) or engine.is_unknown(i)]
            hidden += [i for i, token in added.items() if token.get("special")]
            self.control = {names[i]: i for i in [*hidden, *(i for i, token in added.items() if _is_control(token))]}
            self._texts = {i: _sentencepiece_bytes(name) for i, name in names.items()} | dict.fromkeys(hidden, b"")
            # The engine itself makes one id of a name that is user-defined: where a text spells it, it stays in two.
            self._spelled = {i: bare.encode(name[:1]) + bare.encode(name[1:]) for name, i in self.control.items()}
            self._spelled.pop(engine.unk_id(), None)
        # Only the text at the very start gets sentencepiece's leading space; in the older way each text after a
        # control token does.
        self._first = bare if config.get("add_prefix_space") is False else engine
        self._later = self._first if config.get("legacy") else bare
        self.strips_first_space = self._first.normalize("a") != "a"
        ids = {"bos_token": engine.bos_id(), "eos_token": engine.eos_id(), "unk_token": engine.unk_id()}
        self.names = {name: engine.id_to_piece(i) for name, i in ids.items() if i >= 0}  # where no config has others
        self._bos = [engine.bos_id()] if config.get("add_bos_token", True) and engine.bos_id() >= 0 else []
        self._eos = [engine.eos_id()] if config.get("add_eos_token", False) and engine.eos_id() >= 0 else []

    def begin(self, ids: list[int]) -> list[int]:
        """``ids`` behind the BOS, if the tokenizer's own settings add one."""
        return [*self._bos, *ids]

    def encode(self, text: str) -> list[int]:
        return [*self._bos, *self._plain(self._first, text), *self._eos]

    def encode_parts(self, parts: list[str | int]) -> list[int]:
        """Ids of texts and control tokens in a row, nothing added."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += self._plain(self._later if ids else self._first, part)
        return ids

    def _plain(self, engine, text: str) -> list[int]:
        return [piece for i in engine.encode(text) for piece in self._spelled.get(i, (i,))]

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; none for control tokens and for ids that do not exist."""
        return self._texts.get(token, b"")


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


@contextmanager
def _told(trouble: str) -> Iterator[None]:
    """Turns whatever a library raises over a damaged file into TokenizerError."""
    try:
        yield
    except (KeyboardInterrupt, TokenizerError):
        raise
    except BaseException as error:  # a panic of tokenizers is no Exception
        raise TokenizerError(f"{trouble}: {error!r}") from None


def _read_json(path: Path, optional: bool = False) -> dict:
    with _told(f"{path}: cannot be read"):
        value = {} if optional and not path.exists() else json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return value


def _content(token: object) -> str | None:
    """The text of a token that a config names as a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _clean(text: str) -> str:
    """Text without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
