"""Damaged model folders: whatever is broken, and however, the end is one clean line or a model that works.

2,400 examples, each within 10 s and 1 GB beyond what the process had.
"""

import copy
import json
import resource
import shutil
import struct
from time import perf_counter

import pytest
from conftest import tiny_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from model import ModelError, load
from tokenizer import Tokenizer, TokenizerError

FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), database=None)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|> there"}]

NUMBERS = st.integers(-3, 70) | st.sampled_from([2**16, 2**31 - 1, 2**40, 10**30]) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A small sharded folder with every kind of file."""
    folder = tiny_folder(tmp_path_factory.mktemp("fuzz") / "model", num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {f"model-{n}.safetensors": dict(list(tensors.items())[n::2]) for n in (0, 1)}
    for file, part in shards.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "model")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def use(folder) -> None:
    """Open a folder as chat.py does, and render a chat; only clean errors may come of it."""
    start, before = perf_counter(), peak()
    for attempt in (lambda: Tokenizer.from_folder(folder).chat(CHAT), lambda: load(folder)):
        try:
            attempt()
        except (ModelError, TokenizerError) as error:
            text = str(error)
            assert text
            assert "\n" not in text
    assert perf_counter() - start < 10
    assert peak() - before < 2**30


def damage(draw, value):
    """Replace, remove or add something, somewhere inside a JSON value."""
    value = copy.deepcopy(value)
    parent, key = None, None
    inner = value
    while isinstance(inner, dict | list) and inner and (parent is None or draw(st.integers(0, 3))):
        parent = inner
        key = draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        inner = inner[key]
    if draw(st.booleans()) and isinstance(parent, dict):
        del parent[key]
    else:
        parent[key] = draw(VALUES)
    return value


def cut(draw, data: bytes) -> bytes:
    """Overwrite, drop or insert some bytes."""
    start = draw(st.integers(0, len(data)))
    end = draw(st.integers(start, min(len(data), start + 40)))
    return data[:start] + draw(st.binary(max_size=12)) + data[end:]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
@FUZZ
@given(data=st.data())
def test_damaged_json_ends_in_one_clean_line(file, folder, pristine, data):
    whole = (pristine / file).read_bytes()
    if data.draw(st.integers(0, 3)):
        whole = json.dumps(damage(data.draw, json.loads(whole))).encode()
    else:
        whole = cut(data.draw, whole)
    (folder / file).write_bytes(whole)
    use(folder)


@FUZZ
@given(data=st.data())
def test_damaged_settings_of_the_tokenizer_end_in_one_clean_line(folder, pristine, data):
    file = data.draw(st.sampled_from(["tokenizer_config.json", "generation_config.json"]))
    (folder / file).write_text(json.dumps(damage(data.draw, json.loads((pristine / file).read_bytes()))))
    use(folder)


@FUZZ
@given(data=st.data())
def test_damaged_safetensors_headers_end_in_one_clean_line(folder, pristine, data):
    file = "model-0.safetensors"
    whole = (pristine / file).read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header, body = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    if data.draw(st.booleans()):
        text = json.dumps(damage(data.draw, header)).encode()
        whole = struct.pack("<Q", len(text) + data.draw(st.sampled_from([0, 0, 0, 1, -1, 2**40]))) + text + body
    else:
        whole = cut(data.draw, whole[: 8 + length]) + body
    (folder / file).write_bytes(whole)
    use(folder)


PIECES = [
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ m.content }}",
    "{{ m['role'] }}",
    "{% if add_generation_prompt %}",
    "{% else %}",
    "{% endif %}",
    "{{ raise_exception('no\nsystem') }}",
    "{{ messages[5].content }}",
    "{{ messages|tojson }}",
    "{{ bos_token * 3 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ 1 / 0 }}",
    "{% set x = messages %}",
    "{{ x|length }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% break %}",
    "{{ strftime_now('%Y') }}",
    "{{ m.content.split('e')[1] }}",
    "{%",
    "}}",
    "<|im_end|>",
    "{# ",
]


@FUZZ
@given(parts=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12))
def test_broken_templates_end_in_one_clean_line(folder, parts):
    (folder / "chat_template.jinja").write_text("".join(parts), encoding="utf-8", errors="replace")
    use(folder)
