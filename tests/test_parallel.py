"""Many processes act as one model: the tokens of one, whatever happens to a rank."""

import json
import signal
import socket
import subprocess
import sys

import pytest
import torch
from conftest import HEADS, successor_folder, tiny_folder, token_of
from ranks import answers, started, started_one
from terminal import CHAT, Terminal

import chat
import parallel
from cache import KINDS, make
from model import Checkpoint, Config, Llama, ModelError, load, share
from paged import Pool


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    made, small = tmp_path_factory.mktemp("models"), {"num_hidden_layers": 2}
    for name, (heads, kv_heads) in HEADS.items():
        tiny_folder(made / name, num_attention_heads=heads, num_key_value_heads=kv_heads, **small)
    tiny_folder(made / "tied", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, **small)
    tiny_folder(made / "wide", 0.05, hidden_size=256, intermediate_size=256, **small)  # so that 4 bits fit its parts
    return {path.name: str(path) for path in made.iterdir()}


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def of_one(folders, state):
    """What one process answers."""
    return json.loads(json.dumps(answers(state, folders)))


def of_ranks(world: int, state, folders) -> dict:
    ranks = started(world, "answers", state / f"out-{world}", state, json.dumps(folders))
    try:
        assert [rank.wait(200) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
    return json.loads((state / f"out-{world}").read_text())


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_answer_as_one_process_does(world, state, folders, of_one):
    of_several = of_ranks(world, state, folders)
    assert {name: said for name, said in of_several.items() if said != of_one[name]} == {}
    assert of_several.keys() == of_one.keys()


def test_three_ranks_answer_as_one_process_does_with_the_default_model(state, default_model):
    folders = {"default": str(default_model)}
    assert of_ranks(3, state, folders) == answers(state, folders)


KNOWN_HERE = {
    *("attend", "bytes_at", "bytes_each", "bytes_for", "for_kernels", "held_at", "missing", "reusable", "shapes"),
    "state",
    *("restore", "turn", "take", "share", "drop", "rename", "write", "copy"),  # done inside of what all are told
}


def test_whatever_changes_a_cache_is_done_by_every_rank():
    told = {*parallel.ALIKE, *parallel.ANSWERED}
    for kind in (*KINDS.values(), Pool):
        methods = {name for name in dir(kind) if name[0] != "_" and callable(getattr(kind, name))}
        assert methods - told <= KNOWN_HERE, f"is every rank told of these of {kind.__name__}?"


# ---- a rank's part


class Counted:
    """A file of tensors, or one of its tensors, that counts the bytes which are read."""

    read = 0

    def __init__(self, opened):
        self.opened = opened

    def __getattr__(self, name: str):
        return getattr(self.opened, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def get_slice(self, name: str):
        return Counted(self.opened.get_slice(name))

    def __getitem__(self, place):
        values = self.opened[place]
        Counted.read += values.nbytes
        return values


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_reads_and_holds_its_part_and_no_more(world, folders, monkeypatch):
    opened = Checkpoint._open
    monkeypatch.setattr(Checkpoint, "_open", lambda self, path: Counted(opened(self, path)))

    def read_by(**part) -> tuple[Llama, int]:
        Counted.read = 0
        return load(folders["GQA"], **part), Counted.read

    (whole, total), parts = read_by(), [read_by(rank=rank, world=world) for rank in range(world)]
    named = dict(whole.named_parameters())
    norms = sum(p.nbytes for name, p in named.items() if "norm" in name)
    keys = sum(p.nbytes // 2 for name, p in named.items() if "qkv_proj" in name)  # of 4 + 2 + 2 heads, 2 + 2
    assert sum(read for _, read in parts) == total + (world - 1) * norms + (world // 2 - 1) * keys
    cache = make("contiguous", whole.config, 64)
    for part, _ in parts:
        held = sum(parameter.nbytes for parameter in part.parameters())
        assert held == Llama.bytes_for(part.config, torch.float32, world=world)
        assert make("contiguous", part.config, 64).bytes_reserved == cache.bytes_reserved // 2


def test_heads_that_do_not_divide_are_refused_in_words():
    sizes = {"vocab_size": 100, "hidden_size": 48, "intermediate_size": 240, "num_hidden_layers": 1}
    config = Config(**sizes, num_attention_heads=12, num_key_value_heads=4)
    assert [share(config, world).num_key_value_heads for world in (1, 2, 4, 12)] == [4, 2, 1, 1]
    with pytest.raises(ModelError, match="num_key_value_heads is 4, which does not divide over 6 ranks"):
        share(config, 6)
    with pytest.raises(ModelError, match="num_attention_heads is 12, which does not divide over 5 ranks"):
        share(config, 5)


def test_the_plan_of_a_rank_counts_what_it_holds(folders, capsys):
    part = load(folders["GQA"], world=4)
    assert chat.main(["--plan", "--world", "4", "--model", folders["GQA"]]) == 0
    said = capsys.readouterr().out
    assert f" {sum(parameter.nbytes for parameter in part.parameters())} bytes" in said
    assert f" {make('contiguous', part.config, 512).bytes_reserved} bytes" in said
    assert chat.main(["--world", "4", "--model", folders["GQA"]]) == 2
    assert "torchrun" in capsys.readouterr().err


# ---- a rank that fails


@pytest.mark.parametrize(
    ("rank", "fault", "told"),
    [
        (2, "killed", "chat: rank 2 is gone"),
        (0, "killed", "chat: rank 0 is gone"),
        (1, "hangs", "chat: rank 1 has said nothing for 12 seconds"),
        (1, "sleeps", "chat: rank 1 hangs"),
        (1, "memory", "chat: rank 1: no memory left (MemoryError)"),
        (0, "memory", "chat: rank 0: no memory left (MemoryError)"),
        (1, "fault", "chat: rank 1: ZeroDivisionError: so it goes"),
    ],
)
def test_a_rank_that_fails_ends_all_of_them_with_one_line_that_names_it(rank, fault, told, folders):
    argv = "chat", rank, fault, "-p", "hello", "--model", folders["MHA"], "--stats", "off"
    ranks = started(4 if rank == 2 else 2, *argv, stderr=subprocess.PIPE, text=True)
    try:
        lines = [line for each in ranks for line in each.communicate(timeout=60)[1].splitlines()]
    finally:
        for each in ranks:
            each.kill()
    (line,) = [line for line in lines if line.startswith("chat:")]
    assert line.startswith(told)
    assert not any("Traceback" in line for line in lines)
    assert ranks[0].returncode == (-9 if (rank, fault) == (0, "killed") else 2)


def test_what_a_person_can_mend_is_said_once(folders):
    argv = "chat", "-", "-", "-p", "hello", "--model", "no/such/folder"
    ranks = started(2, *argv, stderr=subprocess.PIPE, text=True)
    first, second = (each.communicate(timeout=60)[1] for each in ranks)
    assert first.startswith("chat: no/such/folder") and first.count("\n") == 1 and second == ""
    assert [each.returncode for each in ranks] == [2, 0]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_rank_that_waits_in_vain_for_the_first_can_be_ended(signum):
    with socket.create_server(("127.0.0.1", 0)) as first:
        first.settimeout(60)
        rank = started_one(1, 2, first.getsockname()[1], CHAT, "-p", "hello", stderr=subprocess.PIPE, text=True)
        try:
            connection, _ = first.accept()
            with connection:
                rank.send_signal(signum)
                assert rank.communicate(timeout=10) == (None, "")
        finally:
            rank.kill()
    assert rank.returncode == -signum


@pytest.mark.parametrize(
    ("rank", "world", "named"),
    [
        *[(value, "2", "RANK is ") for value in ("x", "1.5", "", "-1", "2", "7")],
        *[("0", value, "WORLD_SIZE is ") for value in ("x", "1.5", "", "-1", "0")],
        ("1", "1", "RANK is 1, and with a WORLD_SIZE of 1 it is from 0 to 0"),
    ],
)
def test_a_place_that_no_rank_can_have_is_refused_at_once(rank, world, named, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    assert parallel.run(lambda: pytest.fail("it ran")) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"chat: {named}") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (OSError(28, "No space left on device", "/memory.safetensors"), False),
        (ValueError("/memory.safetensors was saved at another time"), False),
        (OSError(12, "Cannot allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
    ],
)
def test_a_session_called_memory_is_no_lack_of_memory(error, fatal):
    assert parallel.is_fatal(error) == parallel.is_for_memory(error) == fatal


# ---- a terminal


def test_a_chat_under_torchrun_is_interrupted_kept_and_gone_on_with(tmp_path, monkeypatch, capsys):
    newline, a, b = map(token_of, b"\nab")
    model = successor_folder(tmp_path / "model", {newline: a, a: b, b: a}, context=4096, heads=2)
    torchrun = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 {CHAT} --model {model}"
    terminal = Terminal(tmp_path, command=torchrun, start=90)
    terminal.type("go\r")
    terminal.see("abab")
    terminal.type("\x03")
    terminal.see("| interrupt |")
    terminal.ready()
    terminal.type("\x03")
    terminal.see("Ctrl-D or /quit leaves")
    terminal.ready()
    assert "/load two" in " ".join(terminal.say("/save two"))
    assert sum("on this rank, one of 2: " in line for line in terminal.say("/cache")) >= 2
    terminal.type("\x04")
    assert terminal.end() == 0

    terminal = Terminal(tmp_path, command=f"{torchrun} --load two", start=90)
    shown = "\n".join(terminal.screen.shown)
    assert "tokens in the cache" in shown and "bytes of cache a token on this rank" in shown
    (tmp_path / "kv-chat" / "sessions" / "two.safetensors.1").unlink()
    terminal.screen.reset()
    terminal.type("/load two\r")
    terminal.see("two is not whole (rank 1: ")
    terminal.see("[y/N]")
    terminal.type("y\r")
    terminal.see("computed again with the next message")
    terminal.ready()
    terminal.say("/save two")
    assert "tokens in the cache" in " ".join(terminal.say("/load two"))
    terminal.type("\x04")
    assert terminal.end() == 0

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", None)
    assert chat.main(["--load", "two", "-p", "hello", "--model", str(model)]) == 2
    assert "its number of ranks is another" in capsys.readouterr().err


# ---- figures


def test_the_bench_of_ranks_tells_memory_and_what_sums_take(tmp_path):
    model = successor_folder(tmp_path / "model", {}, context=1024, heads=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    asked = [str(CHAT.parent / "bench.py"), "--ranks", "--rounds", "1", "--json", "--model", str(model)]
    done = subprocess.run([*torchrun, *asked], capture_output=True, text=True, timeout=120, check=True)
    ranks = json.loads(done.stdout)
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["weights"] == Llama.bytes_for(share(Config.from_folder(model), 2), torch.float32, world=2)
        assert 0 < rank["prompt_summing_s"] < rank["prompt_s"] and 0 < rank["step_summing_s"] < rank["step_s"]
