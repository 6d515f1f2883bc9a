"""resolve: names become folders, by way of a small Hugging Face Hub on this machine's loopback."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import successor_folder
from safetensors.torch import load_file, save_file

import model
from tokenizer import Tokenizer
from weights import get

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(get.__file__).parent.parent
RUN = """
import sys
from weights.get import GetError, resolve
try:
    print(resolve(sys.argv[1], offline="--offline" in sys.argv))
except GetError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


class Hub(ThreadingHTTPServer):
    """Serves the files of one folder as the model org/tiny, and `refused` names with the status and headers given.
    Keeps what was asked for; cuts the first `cuts` bodies of weights in the middle."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Desk)
        self.files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        self.refused, self.asked, self.ranges, self.cuts = {}, [], [], 0
        self.url = f"http://127.0.0.1:{self.server_port}"


class Desk(BaseHTTPRequestHandler):
    timeout = 10

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        for part, (status, headers) in hub.refused.items():
            if part in path:
                return self.answer(b"{}", status, headers)
        if path in ("/api/models/org/tiny/revision/main", f"/api/models/org/tiny/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in hub.files]
            return self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        if path == f"/api/models/org/tiny/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            return self.answer(json.dumps(entries).encode())
        name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
        if path.startswith("/api/models/org/tiny/"):
            return self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        if name not in hub.files:
            return self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        data, status = hub.files[name], 200
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if span := self.headers.get("Range"):
            hub.ranges.append(span)
            start = int(span.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        self.answer(data, status, headers)

    do_HEAD = do_GET

    def answer(self, data, status=200, headers=()):
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.cuts and self.path.endswith(".safetensors"):
            self.server.cuts -= 1
            data, self.close_connection = data[: len(data) // 2], True
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A model in three shards, with much beside it that nobody needs."""
    folder = successor_folder(tmp_path_factory.mktemp("hub") / "tiny", {})
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"model-{n % 3 + 1:05}-of-00003.safetensors" for n, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "model.safetensors").unlink()
    for stray in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "original/params.json", "onnx/x.onnx"):
        (folder / stray).parent.mkdir(exist_ok=True)
        (folder / stray).write_bytes(b"stray")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def hub(original):
    server = Hub(original)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture
def resolve(hub, tmp_path):
    """Runs get.resolve in a process of its own with an empty home: (exit status, stdout, stderr), of this without the
    line that says whom we ask."""

    def run(*arguments, **environment):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        clean |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        clean |= {"NO_PROXY": "127.0.0.1", **environment}
        command = [sys.executable, "-c", RUN, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=20)
        asks = f"{arguments[0]} is not here; asking {clean['HF_ENDPOINT']}\n"
        return done.returncode, done.stdout.strip(), done.stderr.removeprefix(asks).strip()

    return run


def test_just_what_is_needed_is_downloaded_once_and_loads(hub, original, resolve):
    status, folder, said = resolve("org/tiny")
    assert (status, said) == (0, "")
    shards = {path.name for path in original.glob("model-*.safetensors")}
    texts = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert len(shards) == 3
    assert {p.name for p in Path(folder).iterdir()} == shards | texts | {"model.safetensors.index.json"}
    got = {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET /org/")}
    assert got == {p.name for p in Path(folder).iterdir()}
    ours, theirs = model.load(folder), model.load(original)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert Tokenizer.from_folder(folder).encode("hi") == Tokenizer.from_folder(original).encode("hi")

    hub.asked.clear()  # from now on nobody needs the hub
    assert resolve("org/tiny") == resolve("org/tiny", "--offline") == (0, folder, "")
    assert resolve("org/tiny", HF_HUB_OFFLINE="1") == resolve(f"org/tiny@{COMMIT}") == (0, folder, "")
    assert hub.asked == []

    next(Path(folder).glob("model-*")).unlink()  # as if an earlier download had been interrupted
    status, _, said = resolve("org/tiny", "--offline")
    assert status == 2 and "nor a whole one in the cache" in said
    assert resolve("org/tiny") == (0, folder, "")


def test_a_broken_download_is_resumed(hub, resolve):
    data = os.urandom(24 * 2**20)  # the hub's client writes 10 MiB at a time
    del hub.files["model.safetensors.index.json"]
    hub.files["model.safetensors"], hub.cuts = data, 1
    status, folder, said = resolve("org/tiny")
    assert (status, said) == (0, "")
    assert hub.ranges == [f"bytes={10 * 2**20}-"]
    assert (Path(folder) / "model.safetensors").read_bytes() == data


@pytest.mark.parametrize("arguments, environment", [(["--offline"], {}), ([], {"HF_HUB_OFFLINE": "1"})])
def test_offline_nobody_is_asked(hub, resolve, arguments, environment):
    status, out, said = resolve("org/tiny", *arguments, **environment)
    assert (status, out, hub.asked) == (2, "", [])
    assert said == "org/tiny: no such model folder, nor a whole one in the cache, and we are offline"


@pytest.mark.parametrize(
    "name, refused, words",
    [
        ("org/tiny", {"/api/": (401, {"X-Error-Message": "Invalid credentials"})}, "hf auth login"),
        ("org/tiny", {"/api/": (403, {})}, "access denied: `hf auth login`"),
        ("org/tiny", {"config.json": (403, {"X-Error-Code": "GatedRepo"})}, "ask for access at http://127.0.0.1"),
        ("org/absent", {"/org/absent": (404, {"X-Error-Code": "RepoNotFound"})}, "nor such a public model"),
        ("org/tiny@v9", {}, "not this revision"),
        ("org/ti--ny", {}, "no such model folder"),
        ("org/tiny", {"/api/": (500, {})}, "500 Internal Server Error"),
        ("org/tiny", {"/model-0": (410, {})}, "410 Gone"),
    ],
)
def test_a_refusal_is_one_line_that_says_what_to_do(hub, resolve, name, refused, words):
    hub.refused = refused
    status, out, said = resolve(name)
    assert (status, out) == (2, "") and said.startswith(f"{name}: ") and words in said and "\n" not in said


def test_a_hub_that_is_away_is_one_line(hub, resolve):
    status, out, said = resolve("org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert (status, out) == (2, "") and "Connection refused" in said and "\n" not in said


def test_pickles_alone_are_no_model(hub, resolve):
    for name in [name for name in hub.files if "safetensors" in name]:
        del hub.files[name]
    status, out, said = resolve("org/tiny")
    assert status == 2
    assert said == "org/tiny: the model is there, but has no safetensors, and pickles are never opened"
    assert len(hub.asked) == 1


def test_an_index_of_pickles_is_no_model(hub, resolve):
    hub.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "pytorch_model.bin"}}'
    status, out, said = resolve("org/tiny")
    assert status == 2 and said.endswith("has no safetensors, and pickles are never opened")
    assert not any(line.endswith(".bin") for line in hub.asked)


def test_a_cached_folder_without_a_tokenizer_is_fetched_again(hub, resolve):
    status, folder, _ = resolve(f"org/tiny@{COMMIT}")
    assert status == 0
    trees = Path(folder).parents[1] / "trees"  # the client's own list of what is there, which older ones do not write
    shutil.rmtree(trees, ignore_errors=True)
    (Path(folder) / "tokenizer.json").unlink()
    assert resolve(f"org/tiny@{COMMIT}", "--offline")[0] == 2
    assert resolve(f"org/tiny@{COMMIT}") == (0, folder, "")
    assert (Path(folder) / "tokenizer.json").exists()
    shutil.rmtree(trees, ignore_errors=True)
    (Path(folder) / "tokenizer.json").rename(Path(folder) / "tokenizer.model")
    assert resolve(f"org/tiny@{COMMIT}", "--offline") == (0, folder, "")


def test_a_model_without_a_tokenizer_is_said(hub, resolve):
    del hub.files["tokenizer.json"]
    status, _, said = resolve("org/tiny")
    assert status == 2
    assert said == "org/tiny: the model is there, but has neither tokenizer.json nor tokenizer.model"


def test_a_hub_that_never_answers_is_given_up(tmp_path, monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(get, "PATIENCE", 0.5)
        start = time.monotonic()
        with pytest.raises(get.GetError, match=r"^org/tiny: .* failed \(.*timed out.*\): try again$"):
            get.resolve("org/tiny")
        assert time.monotonic() - start < 5
    assert capfd.readouterr() == ("", f"org/tiny is not here; asking {endpoint}\n")


def test_a_file_is_no_folder_and_stays_off_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(get, "snapshot", None)
    Path("org").mkdir()
    for name in ("x.bin", "org/m.gguf"):
        Path(name).touch()
    for name, end in {"x.bin": "", "org/m.gguf": "; `python weights/get.py org/m.gguf` makes one of it"}.items():
        with pytest.raises(get.GetError) as caught:
            get.resolve(name)
        assert str(caught.value) == f"{name}: a file; --model takes a folder{end}"


def test_a_folder_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org/name").mkdir(parents=True)
    assert get.resolve("org/name") == Path("org/name")
    assert get.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["", "x", "../x", "x/..", "a/b/c", "/etc/none", "weights/typo", "org/na me", "org/x@../../y", "x" * 5000]
)
def test_no_other_name_reaches_the_hub(name, monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(get, "snapshot", None)
    with pytest.raises(get.GetError) as caught:
        get.resolve(name)
    assert str(caught.value) == f"{name}: no such model folder"


def test_a_full_disk_is_said(monkeypatch):
    def full(*_, local_files_only=False):
        raise FileNotFoundError if local_files_only else OSError(28, "No space left on device")

    monkeypatch.setattr(get, "look_up", lambda *_: None)
    monkeypatch.setattr(get, "snapshot", full)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(get.GetError, match="no space left in .*HF_HOME"):
        get.resolve("org/tiny")
