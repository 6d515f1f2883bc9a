"""chat.py: what goes to stdout and to stderr, how it ends, and what a person sees and types in a terminal."""

import io
import itertools
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pyte
import pytest
from conftest import says, successor_folder, token_of, write_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyte.screens import wcwidth

import chat
from generate import Step, Turn

CHAT = Path(chat.__file__)
ANSWER = "Hélo, wrd!"  # of the folder `successor`
STEPS = len(ANSWER.encode())
SUMMARY = re.compile(
    r"\[prompt (\d+) new at \d+ tok/s \+ (\d+) reused \| answer (\d+) at [\d.]+ tok/s, [\d.]+ GB/s \| "
    r"cache (\w+) (\d+)/(\d+) tokens, [\d.]+ of [\d.]+ \w+ \| (\w+) \| seed (\d+)\]"
)


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Path:
    """A model that answers "ababab…" and never stops."""
    newline, a, b = map(token_of, b"\nab")
    return successor_folder(tmp_path_factory.mktemp("models") / "endless", {newline: a, a: b, b: a})


@pytest.fixture
def run(monkeypatch, capsys):
    """Run chat.py in this process: (exit code, stdout, stderr). Without ``stdin`` a person sits at a terminal."""

    def run(*argv, stdin: bytes | None = None) -> tuple[int, str, str]:
        stream = io.TextIOWrapper(io.BytesIO(stdin or b""))
        stream.isatty = lambda: stdin is None
        monkeypatch.setattr(sys, "stdin", stream)
        code = chat.main([str(arg) for arg in argv])
        return code, *capsys.readouterr()

    return run


def events(stdout: str) -> list[dict]:
    return [json.loads(line) for line in stdout.splitlines()]


def environment(**extra) -> dict[str, str]:
    """This one, but for what changes how chat.py prints."""
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "PYTHONUNBUFFERED")}
    return {**known, "TERM": "xterm-256color", **extra}


def start(*argv, **options) -> subprocess.Popen:
    """chat.py as a process of its own, by default without input."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Unbuffered, so that what a test has not read yet is still in the pipe for communicate().
    return subprocess.Popen([sys.executable, CHAT, *argv], **{**streams, "bufsize": 0, "env": environment(), **options})


def is_one_line(stderr: str, *parts: str) -> bool:
    return stderr.startswith("chat: ") and stderr.count("\n") == 1 and all(part in stderr for part in parts)


# ---- one answer


def test_stdout_holds_the_answer_alone(run, successor):
    code, out, err = run("--model", successor, "-p", "hi")
    assert (code, out) == (0, f"{ANSWER}\n")
    assert SUMMARY.fullmatch(err.strip())


def test_nothing_is_coloured_or_animated_without_a_terminal(run, successor):
    for mode in chat.STATS:
        _, out, err = run("--model", successor, "-p", "hi", "--stats", mode)
        assert not re.search(r"[\x1b\r]", out + err)


def test_piped_stdin_is_the_prompt(run, successor):
    code, out, _ = run("--model", successor, stdin=b"hi\n")
    assert (code, out) == (0, f"{ANSWER}\n")


@pytest.mark.parametrize(
    "argv, stdin, prompt",
    [
        ([], b"some\n\nlines\n", "some\n\nlines"),
        (["-p", "say"], b"some\nlines\n", "some\nlines\n\nsay"),
        (["-p", "say"], b"", "say"),
        (["-p", "say"], None, "say"),
        (["-p", "\n"], b"x", "x\n\n\n"),
        ([], b"caf\xe9", "caf\N{REPLACEMENT CHARACTER}"),
        ([], None, None),
    ],
)
def test_prompt_is_what_is_piped_then_a_blank_line_then_the_text(monkeypatch, argv, stdin, prompt):
    stream = io.TextIOWrapper(io.BytesIO(stdin or b""))
    stream.isatty = lambda: stdin is None
    monkeypatch.setattr(sys, "stdin", stream)
    assert chat.prompt_text(chat.arguments(argv)) == prompt


def test_stdin_that_is_not_utf8_is_answered(run, successor):
    code, out, err = run("--model", successor, "--stats", "off", stdin=b"caf\xe9 \xff\n")
    assert (code, out, err) == (0, f"{ANSWER}\n", "")


def test_raw_goes_on_from_the_text_without_a_template(run, successor):
    _, out, _ = run("--model", successor, "-p", "x\n", "--raw", "--json")
    assert events(out)[0]["prompt_tokens"] == 2
    assert events(out)[-1]["text"] == ANSWER
    _, out, _ = run("--model", successor, "-p", "H", "--raw", "--stats", "off")
    assert out == ANSWER[1:] + "\n"


def test_stop_string_ends_the_answer_and_is_not_shown(run, successor):
    code, out, err = run("--model", successor, "-p", "hi", "--stop", "never", "--stop", "lo,")
    assert (code, out) == (0, "Hé\n")
    assert SUMMARY.fullmatch(err.strip())[7] == "stop"


def test_system_message_comes_first(run, successor):
    plain, system = (
        events(run("--model", successor, "-p", "hi", "--json", *extra)[1])[0]["prompt_tokens"]
        for extra in ([], ["--system", "BE"])
    )
    assert system - plain == len(["<|im_start|>", *"system\n", *"BE", "<|im_end|>", "\n"])


def test_without_a_cache_the_answer_is_the_same(run, tiny_gqa):
    options = ("--model", tiny_gqa, "-p", "hi", "--seed", 1, "-n", 16, "--json")
    cached, recomputed = (events(run(*options, "--cache", kind)[1]) for kind in ("contiguous", "none"))
    assert recomputed[-1]["text"] == cached[-1]["text"]
    assert recomputed[0]["cache"]["kind"] == "none"
    assert recomputed[0]["cache"]["bytes_reserved"] == 0
    assert all(step["cache_tokens"] == 0 for step in recomputed[1:-1])


def test_seed_repeats_an_answer_and_the_one_drawn_is_shown(run, tiny_gqa):
    def answer(*seed) -> tuple[str, str]:
        _, out, err = run("--model", tiny_gqa, "-p", "hi", "--temp", 1, "-n", 24, *seed)
        return out, SUMMARY.search(err)[8]

    assert answer("--seed", 5) == answer("--seed", 5)
    assert answer("--seed", 5)[0] != answer("--seed", 6)[0]
    text, seed = answer()
    assert answer("--seed", seed) == (text, seed)
    assert answer()[1] != seed


# ---- stats


def test_stats_off_says_nothing(run, successor):
    assert run("--model", successor, "-p", "hi", "--stats", "off") == (0, f"{ANSWER}\n", "")


def test_summary_counts_what_was_computed_and_held(run, successor):
    _, _, err = run("--model", successor, "-p", "hi", "--stats", "summary", "--seed", 7)
    prompt = len(["<|im_start|>", *"user\n", *"hi", "<|im_end|>", "\n", "<|im_start|>", *"assistant\n"])
    counts = (str(prompt), "0", str(STEPS), "contiguous", str(prompt + STEPS), "512", "eos", "7")
    assert SUMMARY.fullmatch(err.strip()).groups() == counts


def test_stats_step_has_a_line_for_each_step(run, successor):
    _, out, err = run("--model", successor, "-p", "hi", "--stats", "step")
    *steps, summary = err.splitlines()
    assert out == f"{ANSWER}\n"
    assert SUMMARY.fullmatch(summary)
    speed = r" +[\d.]+ ms +(?:[\d.]+ tok/s|\(prefill\))"
    form = re.compile(rf" +(\d+) +(\d+)/512 tokens +([\d,]+) of 1,064,960 bytes{speed} +\d+ (\".*\")")
    lines = [form.fullmatch(line).groups() for line in steps]
    assert [int(n) for n, *_ in lines] == [*range(1, STEPS + 1)]
    assert all(int(held.replace(",", "")) == int(tokens) * 2080 for _, tokens, held, _ in lines)
    assert "".join(json.loads(text) for *_, text in lines) == ANSWER


@pytest.mark.parametrize(
    "used, reserved, text",
    [
        (0, 0, "0.0 of 0.0 B"),
        (4608, 196608, "4.5 of 192.0 KiB"),
        (66560, 2**20, "0.1 of 1.0 MiB"),
        (2**30, 5 * 2**31, "1.0 of 10.0 GiB"),
    ],
)
def test_bytes_used_and_reserved_share_a_unit(used, reserved, text):
    assert chat.of(used, reserved) == text


# ---- json


def test_json_lines_are_as_documented(run, tiny_gqa):
    code, out, err = run("--model", tiny_gqa, "-p", "hi é", "--json", "--seed", 3, "--temp", 1, "-n", 24)
    first, *steps, last = events(out)
    assert (code, err) == (0, "")

    assert list(first) == ["event", "model", "prompt_tokens", "reused_tokens", "seed", "cache"]
    assert list(first["cache"]) == ["kind", "capacity", "bytes_per_token", "bytes_reserved"]
    per_token, capacity = first["cache"]["bytes_per_token"], first["cache"]["capacity"]
    assert (first["event"], first["model"], first["reused_tokens"], first["seed"]) == ("start", "gqa", 0, 3)
    assert first["cache"]["kind"] == "contiguous"
    assert first["cache"]["bytes_reserved"] == capacity * per_token == 512 * 384

    for n, step in enumerate(steps, 1):
        assert list(step) == ["event", "n", "token", "text", "cache_tokens", "cache_bytes", "ms"]
        assert (step["event"], step["n"]) == ("step", n)
        assert step["cache_tokens"] == first["prompt_tokens"] + n
        assert step["cache_bytes"] == step["cache_tokens"] * per_token
        assert step["ms"] > 0

    counts = ["event", "stop", "text", "prompt_tokens", "reused_tokens", "generated_tokens"]
    assert list(last) == [*counts, "prefill_s", "decode_s", "prefill_tok_s", "decode_tok_s"]
    assert last["event"] == "done"
    assert last["generated_tokens"] == len(steps) <= 24
    assert last["stop"] in ("eos", "length")
    assert last["text"] == "".join(step["text"] for step in steps)
    assert (last["prompt_tokens"], last["reused_tokens"]) == (first["prompt_tokens"], 0)
    assert last["decode_s"] == pytest.approx(sum(step["ms"] for step in steps) / 1e3, rel=0.5)


def test_verify_says_how_far_a_recompute_differs(run, tiny_gqa):
    _, out, _ = run("--model", tiny_gqa, "-p", "hi", "--json", "--verify", "-n", 8, "--seed", 1)
    for step in events(out)[1:-1]:
        assert list(step)[-2:] == ["max_abs_diff", "argmax_equal"]
        assert 0 <= step["max_abs_diff"] < 1e-4
        assert step["argmax_equal"] is True
    _, _, err = run("--model", tiny_gqa, "-p", "hi", "--verify", "-n", 8, "--seed", 1, "--stats", "off")
    assert is_one_line(err, "differ by at most", "8 of 8 steps choose the same token")


# ---- what the user must mend


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["--model", "nowhere"], ["nowhere", "no such model folder"]),
        (["-c", "8"], ["21 tokens", "holds 8"]),
        (["-c", "20"], ["21 tokens", "holds 20"]),
        (["-c", "0"], ["--ctx-size", "0"]),
        (["-c", "-3"], ["--ctx-size", "-3"]),
        (["-c", "many"], ["--ctx-size", "many"]),
        (["-c", str(10**15)], ["10" + "0" * 14, "bytes", "--ctx-size"]),
        (["-n", "-1"], ["max_tokens", "-1"]),
        (["-n", "1.5"], ["--max-tokens", "1.5"]),
        (["--temp", "-1"], ["temperature", "-1"]),
        (["--temp", "nan"], ["temperature", "nan"]),
        (["--temp", "inf"], ["temperature", "inf"]),
        (["--top-k", "-1"], ["top_k", "-1"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--top-p", "-0.1"], ["top_p", "-0.1"]),
        (["--min-p", "2"], ["min_p", "2"]),
        (["--repeat-penalty", "0"], ["repeat_penalty", "0"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--stop", ""], ["stop string"]),
        (["--cache", "huge"], ["--cache", "huge", "contiguous"]),
        (["--dtype", "int3"], ["--dtype", "int3", "bfloat16"]),
        (["--device", "abacus"], ["--device", "abacus", "cpu"]),
        (["--stats", "loud"], ["--stats", "loud", "summary"]),
        (["--nonsense"], ["--nonsense", "--help"]),
        (["--max", "3"], ["--max"]),
        (["two\nlines"], ["two lines"]),
        (["-p", ""], ["prompt is empty"]),
        (["-p", " \n"], ["prompt is empty"]),
    ],
)
def test_what_the_user_must_mend_is_one_line_and_exit_2(run, successor, argv, parts):
    code, out, err = run("--model", successor, "-p", "hi", *argv)
    assert (code, out) == (2, "")
    assert is_one_line(err, *parts)


@pytest.mark.parametrize("stdin", [b"", b"\n", b" \n\t\n"])
def test_empty_pipe_is_an_error(run, successor, stdin):
    code, out, err = run("--model", successor, stdin=stdin)
    assert (code, out) == (2, "")
    assert is_one_line(err, "prompt is empty")


def test_json_needs_a_prompt(run, successor):
    code, out, err = run("--model", successor, "--json")
    assert (code, out) == (2, "")
    assert is_one_line(err, "--json")


@pytest.mark.parametrize("left_out", ["config.json", "model.safetensors", "tokenizer.json"])
def test_incomplete_folder_is_named_with_what_it_lacks(run, successor, tmp_path, left_out):
    for file in successor.iterdir():
        if file.name != left_out:
            (tmp_path / file.name).symlink_to(file)
    code, out, err = run("--model", tmp_path, "-p", "hi")
    assert (code, out) == (2, "")
    assert is_one_line(err, str(tmp_path), left_out)


def test_tokenizer_of_another_model_is_refused(run, successor, tmp_path):
    for file in successor.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["id"] += 1000
        tokenizer["model"]["vocab"][token["content"]] = token["id"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, out, err = run("--model", tmp_path, "-p", "hi")
    assert (code, out) == (2, "")
    assert is_one_line(err, "outside the model's vocabulary of 260")


def test_default_model_is_not_fetched_offline(run, monkeypatch, tmp_path):
    from weights import get

    monkeypatch.setattr(get, "WEIGHTS", tmp_path)
    code, out, err = run("-p", "hi", "--offline")
    assert (code, out) == (2, "")
    assert is_one_line(err, "--offline", "--model")


# ---- the context


@pytest.mark.parametrize(
    "prompt, context, most, generated, stop",
    [
        (4, 10, None, 6, "context"),
        (4, 10, 100, 6, "context"),
        (4, 10, 6, 6, "length"),
        (4, 10, 3, 3, "length"),
        (4, 10, 0, 0, "length"),
        (9, 10, None, 1, "context"),
        (10, 10, None, 0, "context"),
        (1, 1, None, 0, "context"),
    ],
)
def test_prompt_and_answer_never_exceed_the_context(run, endless, prompt, context, most, generated, stop):
    limit = [] if most is None else ["-n", most]
    text = "x" * prompt if prompt == context else "x" * (prompt - 1) + "\n"
    code, out, err = run("--model", endless, "--raw", "-p", text, "-c", context, "--json", *limit)
    done = events(out)[-1]
    assert code == 0
    assert (done["prompt_tokens"], done["generated_tokens"], done["stop"]) == (prompt, generated, stop)
    assert is_one_line(err, f"{context} tokens is full") if stop == "context" else err == ""


def test_context_beyond_the_models_is_allowed_with_a_note(run, successor):
    code, out, err = run("--model", successor, "-p", "hi", "-c", 600, "--stats", "off")
    assert (code, out) == (0, f"{ANSWER}\n")
    assert is_one_line(err, "600", "512")


# ---- plan and help


@pytest.mark.parametrize(
    "layers, hidden, heads, kv_heads, dtype, context, cache",
    [
        (32, 4096, 32, 32, "float16", 4096, 2_147_483_648),  # LLaMA-7B
        (80, 8192, 64, 64, "bfloat16", 4096, 10_737_418_240),
        (80, 8192, 64, 8, "bfloat16", 4096, 1_342_177_280),
    ],
)
def test_plan_prints_exact_bytes_from_the_config_alone(
    run, tmp_path, layers, hidden, heads, kv_heads, dtype, context, cache
):
    sizes = {"hidden_size": hidden, "intermediate_size": 11008, "vocab_size": 32000, "num_hidden_layers": layers}
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": dtype, **sizes, **shape}))
    code, out, err = run("--model", tmp_path, "--plan", stdin=b"")
    assert (code, err) == (0, "")
    head_dim = hidden // heads
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * head_dim
    weights = 2 * (layers * (attention + 3 * hidden * 11008) + 2 * 32000 * hidden) + 4 * (2 * layers + 1) * hidden
    assert f"  {weights} bytes" in next(line for line in out.splitlines() if line.startswith("weights"))

    contiguous = out[out.index("cache contiguous") :].split("\n\n")[0]
    exact = {
        int(length): int(count) for length, count in re.findall(r"(\d+) tokens .*  (\d+) bytes$", contiguous, re.M)
    }
    assert exact == {n: cache // context * n for n in (1024, 2048, 4096, 8192)}
    shared = re.findall(r"(MHA|GQA|MQA), +(\d+) heads .*  (\d+) bytes$", out, re.M)
    one = cache // kv_heads * 8192 // context
    assert {(label, int(n)): int(count) for label, n, count in shared} == {
        (label, n): one * n
        for label, n in (("MHA", heads), ("GQA", kv_heads), ("MQA", 1))
        if label != "GQA" or n != heads
    }


def test_plan_ends_at_the_context_that_is_asked_for(run, successor):
    code, out, err = run("--model", successor, "--plan", "-c", 2000)
    assert (code, err) == (0, "")
    lengths = re.findall(r"(\d+) tokens .*  (\d+) bytes$", out[out.index("cache contiguous") :], re.M)
    assert lengths == [("1024", str(1024 * 2080)), ("2000", str(2000 * 2080))]


def test_help_does_not_wait_for_torch():
    program = (
        "import sys, chat\n"
        "try: chat.main(['--help'])\n"
        "except SystemExit: print(*{'torch', 'tokenizers', 'prompt_toolkit', 'jinja2'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=CHAT.parent, capture_output=True, text=True, check=True)
    *text, loaded = done.stdout.splitlines()
    assert loaded == done.stderr == ""
    assert all(f"--{option}" in "\n".join(text) for option in ("prompt", "ctx-size", "seed", "stats", "json", "plan"))


# ---- streams that break


def test_stdout_that_cannot_encode_the_answer_shows_it_all_the_same(successor):
    process = start("--model", successor, "-p", "hi", "--stats", "off", env=environment(PYTHONIOENCODING="ascii"))
    assert process.communicate() == (ANSWER.encode("ascii", "backslashreplace") + b"\n", b"")
    assert process.returncode == 0


@pytest.mark.parametrize("streams", [{}, {"stderr": subprocess.STDOUT}])
def test_closed_pipe_ends_quietly(endless, streams):
    process = start("--model", endless, "-p", "hi", "-c", "20000", "--json", **streams)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 0
    assert not process.stderr or b"Traceback" not in process.stderr.read()


def test_pipe_closed_before_anything_is_written_ends_quietly(successor):
    reader, writer = os.pipe()
    os.close(reader)
    process = start("--model", successor, "--plan", stdout=writer)
    os.close(writer)
    assert process.communicate() == (None, b"")
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_disk_is_one_line(successor):
    with open("/dev/full", "wb") as full:
        process = start("--model", successor, "-p", "hi", stdout=full)
        _, err = process.communicate()
    assert process.returncode == 2
    assert is_one_line(err.decode(), "No space left")


def test_ctrl_c_keeps_what_was_said_and_exits_130(endless):
    process = start("--model", endless, "-p", "hi", "-c", "50000", "--stats", "summary")
    assert b"".join(process.stdout.read(1) for _ in range(4)) == b"abab"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert re.fullmatch(rb"(ab)*a?\n", out)
    note, summary = err.decode().splitlines()
    assert note.startswith("chat: --ctx-size 50000")
    assert SUMMARY.fullmatch(summary)[7] == "interrupt"
    assert int(SUMMARY.fullmatch(summary)[3]) == 4 + len(out) - 1


def test_second_ctrl_c_does_not_wait_for_the_first():
    session = SimpleNamespace(interrupted=False)
    session.interrupt = lambda: setattr(session, "interrupted", True)
    with chat.interruptible(session):
        signal.raise_signal(signal.SIGINT)
        assert session.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- the live line


class Xterm(pyte.Screen):
    """pyte, with what xterm does at the right edge: a character that does not fit wraps, and a movement or an erasure
    there forgets the wrap that is due and counts from the last column; a tab does not."""

    def draw(self, data: str) -> None:
        for character in data:
            if wcwidth(character) == 2 and self.cursor.x == self.columns - 1:
                self.cursor.x = self.columns
            super().draw(character)

    def _forget_wrap(self) -> None:
        self.cursor.x = min(self.cursor.x, self.columns - 1)

    def erase_in_display(self, *args, **options) -> None:
        self._forget_wrap()
        super().erase_in_display(*args, **options)

    def erase_in_line(self, *args, **options) -> None:
        self._forget_wrap()
        super().erase_in_line(*args, **options)

    def tab(self) -> None:
        if self.cursor.x < self.columns:
            super().tab()

    def cursor_up(self, *args) -> None:
        self._forget_wrap()
        super().cursor_up(*args)

    def save_cursor(self) -> None:
        self._forget_wrap()
        super().save_cursor()

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.display]


class Stream(io.StringIO):
    """A stream that is a terminal."""

    def __init__(self, screen: Xterm):
        super().__init__()
        self.terminal, self.sent = pyte.Stream(screen), ""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def reconfigure(self, errors: str) -> None:
        """It can show everything."""

    def write(self, text: str) -> int:
        self.sent += text
        self.terminal.feed(text.replace("\n", "\r\n"))
        return len(text)


@pytest.fixture
def screen(monkeypatch):
    """Makes stdout and stderr one terminal of a size, before which nobody types."""

    def screen(columns: int, rows: int) -> Xterm:
        made = Xterm(columns, rows)
        monkeypatch.setattr(sys, "stdin", None)
        monkeypatch.setattr(sys, "stdout", Stream(made))
        monkeypatch.setattr(sys, "stderr", sys.stdout)
        monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((columns, rows)))
        monkeypatch.setenv("TERM", "xterm")
        return made

    return screen


def show(mode: type[chat.Stats], pieces: list[str], screen: Xterm) -> list[bool]:
    """Show an answer made of ``pieces``; whether a live line stood on the screen after each."""
    cache = SimpleNamespace(kind="contiguous", length=9, capacity=512, bytes_used=9 * 2080, bytes_reserved=512 * 2080)
    session = SimpleNamespace(cache=cache, last=Turn(3, 0, 1, "eos", "".join(pieces), len(pieces), 0.1, 0.1, 3))
    output, seen = chat.TextOutput(mode), []
    output.start(session)
    for n, piece in enumerate(pieces, 1):
        output.step(session, Step(65, piece, n, n * 2080, 0.01))
        seen.append(any(line.startswith("[cache ") for line in screen.shown))
    output.done(session)
    return seen


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab 日é\n\t\x1b", max_size=12), max_size=12), st.sampled_from([(20, 4), (20, 12), (9, 30)]))
@example(["x" * 20], (20, 4))  # to the last column
@example(["x" * 20, "\n", "y"], (20, 4))
@example(["x" * 19, "日", "x" * 17, "\n"], (20, 4))  # a wide character that wraps
@example(["x" * 18, "日"], (20, 4))  # and one that just fits
@example([*"日本語です。" * 8], (20, 4))  # over the bottom of the screen
@example(["x" * 20, "\t"], (20, 4))  # a tab while a wrap is due
@example([*"one\n\ntwo\n\nthree\n\n"], (20, 4))
def test_live_line_leaves_the_text_whole_and_nothing_of_itself(pieces, size):
    # Whatever the text does to the cursor, the screen at the end is the one that the summary alone leaves.
    with pytest.MonkeyPatch.context() as patch:
        made = []
        for mode in (chat.Summary, chat.Live):
            made.append(Xterm(*size))
            patch.setattr(sys, "stdout", Stream(made[-1]))
            patch.setattr(sys, "stderr", sys.stdout)
            patch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size(size))
            patch.setenv("TERM", "xterm")
            show(mode, pieces, made[-1])
        # Room for the line may have been made by scrolling: what scrolled away is not compared.
        plain, live = ("\n".join(screen.shown).strip("\n") for screen in made)
        assert plain.endswith(live) and len(live.split("\n")) >= min(len(plain.split("\n")), size[1] - 1)


def test_live_line_is_there_during_the_answer(screen):
    assert show(chat.Live, ["abc", "日本", "x" * 33, "y"], screen(40, 6)) == [True, True, False, True]


def test_live_line_of_an_answer_that_is_redirected(screen, monkeypatch, capsys):
    redirected = sys.stdout
    made = screen(60, 5)
    monkeypatch.setattr(sys, "stdout", redirected)
    assert show(chat.Live, ["abc", "\x1b[31m"], made) == [True, True]
    assert capsys.readouterr().out == "abc\x1b[31m\n"  # as the model said it
    assert made.shown[0].startswith("[prompt 3 new")
    assert not any("[cache" in line for line in made.shown)


def test_live_and_colour_need_a_terminal_that_can(screen, monkeypatch):
    screen(80, 24)
    assert chat.stats_for(None) is chat.stats_for("live") is chat.Live
    assert chat.Live().dim == "\x1b[2m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert chat.Live().dim == ""
    monkeypatch.setenv("TERM", "dumb")
    assert chat.stats_for(None) is chat.stats_for("live") is chat.Summary


def test_control_characters_of_an_answer_are_shown_to_a_terminal_and_not_obeyed(screen, tmp_path):
    folder = successor_folder(tmp_path / "model", says("\x1b[2J \x9b1m\x07"))
    for mode in ("summary", "live", "step"):
        made = screen(200, 40)
        assert chat.main(["--model", str(folder), "-p", "hi", "--stats", mode]) == 0
        assert r"\x1b[2J \x9b1m\x07" in made.shown
        assert not re.search("\x1b\\[2J|[\x9b\x07]", sys.stdout.sent)


def test_control_characters_of_an_answer_are_kept_when_redirected(run, tmp_path):
    folder = successor_folder(tmp_path / "model", says("\x1b[2J \x9b1m\x07"))
    assert run("--model", folder, "-p", "hi", "--stats", "off")[1] == "\x1b[2J \x9b1m\x07\n"


# ---- the conversation


class Terminal:
    """chat.py in a terminal: what a person sees and types."""

    def __init__(self, state: Path, *argv, columns: int = 160, rows: int = 50, term: str = "xterm-256color"):
        self.screen = Xterm(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.screen.write_process_input = self.type  # the terminal answers where its cursor is
        self.received = b""
        self.child = pexpect.spawn(
            sys.executable,
            [str(CHAT), *map(str, argv)],
            dimensions=(rows, columns),
            env=environment(TERM=term, XDG_STATE_HOME=str(state), PYTHONIOENCODING="utf-8"),
        )
        self.child.delaybeforesend = None
        self.ready()

    def type(self, keys: str) -> None:
        self.child.send(keys)

    def until(self, holds, timeout: float = 20) -> None:
        end = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < end, "\n".join(self.screen.shown)
            try:
                data = self.child.read_nonblocking(4096, 0.05)
                self.received += data
                self.stream.feed(data)
            except pexpect.TIMEOUT:
                pass
            except pexpect.EOF:
                assert holds(), "\n".join(self.screen.shown)

    def see(self, text: str) -> None:
        self.until(lambda: text in "\n".join(self.screen.shown))

    def ready(self) -> None:
        """Wait for an empty prompt."""
        self.until(lambda: self.screen.shown[self.screen.cursor.y] == ">" and self.screen.cursor.x == 2)

    def say(self, text: str) -> list[str]:
        """Clear the screen, type ``text`` and Enter, and return the lines that come, up to the next prompt."""
        self.screen.reset()
        self.type(f"{text}\r")
        self.until(lambda: self.screen.cursor.y and self.screen.shown[self.screen.cursor.y] == ">")
        return self.screen.shown[: self.screen.cursor.y]

    def end(self) -> int:
        """Wait until chat.py has left by itself; its exit code."""
        self.child.expect(pexpect.EOF, timeout=20)
        self.received += self.child.before
        self.child.close()
        return self.child.exitstatus


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> Path:
    """Where the history is kept, as XDG_STATE_HOME names it."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def _terminal(successor, state):
    terminal = Terminal(state, "--model", successor, "--stats", "summary")
    yield terminal
    terminal.child.close(force=True)


@pytest.fixture
def terminal(_terminal):
    """A conversation without a message yet; the program is the same for all the tests, which is quicker."""
    _terminal.say("/clear")
    return _terminal


PASTE = "\x1b[200~{}\x1b[201~"


def reused(lines: list[str]) -> int:
    return int(SUMMARY.search("".join(lines))[2])


def new(lines: list[str]) -> int:
    return int(SUMMARY.search("".join(lines))[1])


def test_turn_is_answered_and_the_next_reuses_the_cache(terminal):
    first, second = terminal.say("hi"), terminal.say("and?")
    assert first[1] == second[1] == ANSWER
    prompt = sum(map(int, SUMMARY.search("".join(first)).groups()[:2]))
    assert reused(second) == prompt + STEPS


def test_clear_forgets_the_conversation(terminal):
    first = terminal.say("hi")
    terminal.say("and?")
    assert terminal.say("/clear")[1] == "chat: the conversation is empty; a system message stays"
    again = terminal.say("hi")
    assert new(again) + reused(again) == new(first) + reused(first)


def test_help_names_every_command(terminal):
    lines = terminal.say("/help")
    assert all(any(line.startswith(f"/{name}") for line in lines) for name in chat.COMMANDS)


@pytest.mark.parametrize("line", ["/nonsense", "/nonsense here", "/"])
def test_unknown_command_is_named_and_not_sent(terminal, line):
    lines = terminal.say(line)
    assert len(lines) == 2
    assert lines[1].startswith("chat: no command /") and "/help" in lines[1]


def test_stats_mode_changes(terminal):
    assert terminal.say("/stats off") == ["> /stats off"]
    assert terminal.say("hi") == ["> hi", ANSWER]
    terminal.say("/stats step")
    lines = terminal.say("hi")
    assert sum("/512 tokens" in line and " ms " in line for line in lines) == STEPS
    assert ANSWER in lines
    assert terminal.say("/stats loud")[1].startswith("chat: /stats takes one of off, summary, live, step")
    terminal.say("/stats live")
    lines = terminal.say("hi")
    assert lines[:2] == ["> hi", ANSWER] and not any("[cache" in line for line in lines)
    terminal.say("/stats summary")


def test_ctrl_c_at_an_empty_prompt_does_not_leave(terminal):
    row = terminal.screen.cursor.y
    terminal.type("\x03")
    terminal.until(lambda: terminal.screen.cursor.y > row)
    terminal.ready()
    assert terminal.say("hi")[1] == ANSWER


def test_ctrl_c_drops_the_line_being_typed(terminal):
    terminal.type("never mind")
    terminal.see("never mind")
    terminal.type("\x03")
    terminal.ready()
    assert terminal.say("hi")[1] == ANSWER


def test_pasted_line_that_starts_with_a_slash_is_a_message(terminal):
    assert ANSWER in terminal.say(PASTE.format("/clear"))
    assert (
        terminal.say("/clear")[1] == "chat: the conversation is empty; a system message stays"
    )  # the next one, typed, is a command


def test_paste_of_several_lines_is_one_message(terminal):
    counts = [new(terminal.say(text)) for text in ("hi", PASTE.format("/clear\r\nhi\rho\n") + "!")]
    typed = len(["<|im_end|>", "\n", "<|im_start|>", *"user\n", *"/clear\nhi\nho\n!"])
    assert counts[1] == typed + len(["<|im_end|>", "\n", "<|im_start|>", *"assistant\n"])


def test_paste_during_an_answer_waits_as_one_message(endless, tmp_path):
    terminal = Terminal(tmp_path, "--model", endless, "-n", "900")
    terminal.received = b""
    terminal.type("hi\r")
    terminal.see("ababab")
    assert b"\x1b[?2004h" in terminal.received.partition(b"abab")[0]  # the terminal is asked to mark pastes
    terminal.screen.reset()
    terminal.type(PASTE.format("/clear\rand more"))
    terminal.see("> /clear")
    terminal.see("and more")
    assert "the conversation is empty" not in "\n".join(terminal.screen.shown)


def test_alt_enter_is_a_new_line_in_the_message(terminal):
    terminal.say("hi")
    assert new(terminal.say("a\x1b\rb")) - new(terminal.say("a")) == len("\nb")


def test_history_is_private_and_lies_under_xdg_state_home(terminal, state):
    terminal.say("remember me")
    (history,) = [path for path in state.rglob("*") if path.is_file()]
    assert "+remember me" in history.read_text().splitlines()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    terminal.screen.reset()
    terminal.type("\x1b[A")  # up
    terminal.see("remember me")
    terminal.type("\x03")
    terminal.ready()


def test_history_file_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        path = chat.private_file(tmp_path / "deep" / "history")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_damaged_history_and_the_ways_to_leave(successor, tmp_path):
    (tmp_path / "kv-chat").mkdir()
    (tmp_path / "kv-chat" / "history").write_bytes(b"\n# 2024\n+caf\xe9 \xff\x00\n+")
    terminal = Terminal(tmp_path, "--model", successor, columns=20)
    text = "a message that is longer than the screen is wide"
    assert ANSWER in terminal.say(text)
    terminal.type("\x04")
    assert terminal.end() == 0


def test_state_folder_that_cannot_be_made_does_not_stop_the_chat(successor, tmp_path):
    (tmp_path / "file").touch()
    terminal = Terminal(tmp_path / "file", "--model", successor)
    terminal.see("chat: messages are not kept")
    assert ANSWER in terminal.say("hi")
    terminal.type("/quit\r")
    assert terminal.end() == 0


def test_dumb_terminal_gets_no_escape_codes(successor, tmp_path):
    terminal = Terminal(tmp_path, "--model", successor, term="dumb")
    assert ANSWER in terminal.say("hi")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert b"\x1b" not in terminal.received


def test_ctrl_c_ends_the_answer_and_the_chat_goes_on(endless, tmp_path):
    terminal = Terminal(tmp_path, "--model", endless, "-c", "50000", "--stats", "live")
    for _ in range(2):
        terminal.screen.reset()
        terminal.type("hi\r")
        terminal.see("ababab")
        terminal.see("[cache ")
        terminal.type("\x03")
        terminal.see("| interrupt |")
        terminal.ready()
        assert not any("[cache " in line for line in terminal.screen.shown)
    terminal.type("\x04")
    assert terminal.end() == 0


def test_turn_that_does_not_fit_is_one_line_and_the_chat_goes_on(successor, tmp_path):
    terminal = Terminal(tmp_path, "--model", successor, "-c", "60", "--stats", "off")
    assert terminal.say("hi") == ["> hi", ANSWER]
    lines = terminal.say("x" * 50)
    assert len(lines) == 2
    assert re.fullmatch(r"chat: the prompt has \d+ tokens and the context holds 60; shorten .*", lines[1])
    terminal.say("/clear")
    assert terminal.say("hi") == ["> hi", ANSWER]
    terminal.type("/quit\r")
    assert terminal.end() == 0


# ---- models that are here


def test_a_model_without_a_template_gets_a_plain_conversation_and_a_note(run, tmp_path):
    chain = dict(itertools.pairwise([token_of(byte) for byte in b": no\nUser:"]))  # and so on, were it not stopped
    folder = successor_folder(tmp_path / "plain", chain)
    write_tokenizer(folder, template=None)
    code, out, err = run("--model", folder, "-p", "yes", "-n", "30", "--stats", "off")
    assert (code, out) == (0, " no\n")
    assert is_one_line(err, "no chat template", "--raw")


def test_the_list_shows_what_loads_and_why_the_rest_does_not(run, successor, tmp_path, monkeypatch):
    weights = tmp_path / "weights"
    shutil.copytree(successor, weights / "good")
    (weights / "bad").mkdir()
    (weights / "bad" / "config.json").write_text('{"model_type": "gemma"}')
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("0" * 40)
    shutil.copytree(successor, snapshot)
    (snapshot / "model.safetensors").unlink()
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    shutil.copytree(successor, snapshot.with_name("1" * 40))
    broken = tmp_path / "hub" / "models--org--broken" / "snapshots" / ("2" * 40)
    broken.mkdir(parents=True)
    (broken / "config.json").symlink_to("nowhere")
    (weights / "a\nb\x1b[31m").mkdir()
    monkeypatch.setattr("weights.get.WEIGHTS", weights)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    code, out, err = run("--list")
    assert code == 0
    assert is_one_line(err, "models--org--broken")
    head, odd, bad, good, cached, other = out.splitlines()
    assert "\x1b" not in odd
    assert re.search(r"a b\\x1b\[31m .* no: ", odd)
    assert head.split() == ["model", "type", "parameters", "weights", "context", "loads"]
    assert re.search(r"bad .* no: config.json: model_type is 'gemma'", bad)
    assert re.search(r"good +llama +0 M +\d+\.\d MiB +512 +yes$", good)
    assert re.search(r"^org/name .* no: .*no weights", cached)
    assert re.search(r"^org/name@1{40} .* yes$", other)


# ---- streams that are closed


@pytest.mark.parametrize(
    ("redirection", "code", "err"),
    [
        ("-p hi </dev/null >&-", 0, r"\[prompt .*"),
        ("-p hi </dev/null 2>&-", 0, ""),
        ("<&-", 2, "chat: there is no stdin.*"),
        ("--raw --system S -p hi </dev/null", 2, "chat: --system needs .*"),
    ],
)
def test_closed_streams_end_without_a_traceback(successor, redirection, code, err):
    command = f"{sys.executable} {CHAT} --model {successor} --stats summary {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, bool(re.fullmatch(err, done.stderr.rstrip("\n")))) == (code, True)


def test_a_template_that_refuses_is_quoted_and_the_chat_goes_on(successor, tmp_path):
    folder = shutil.copytree(successor, tmp_path / "strict")
    refusal = "{% for m in messages if m.content == 'no' %}{{ raise_exception('not a word of that') }}{% endfor %}"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = refusal + config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    terminal = Terminal(tmp_path, "--model", folder, "--stats", "off")
    assert terminal.say("no")[1] == "chat: the chat template refuses this conversation: not a word of that"
    assert terminal.say("hi") == ["> hi", ANSWER]
