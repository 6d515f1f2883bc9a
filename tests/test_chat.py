"""chat.py: what goes to stdout and to stderr, how it ends, and what a person sees and types in a terminal."""

import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyte
import pytest
from conftest import says, successor_folder, token_of, write_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from terminal import ANSWER, CHAT, STEPS, SUMMARY, Xterm, environment
from test_soak import Silence

import chat
import show as showing
from conversation import Conversation
from generate import Sampling, Step, Turn


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
    for mode in showing.MODES:
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


@pytest.mark.parametrize("kind", chat.CACHES)
def test_every_kind_of_cache_is_at_hand_and_answers_alike(run, tiny_gqa, tmp_path, kind):
    options = ("--model", tiny_gqa, "-p", "hi", "--temp", 0, "-n", 16, "--json", "--dtype", "float32")
    plain, other = (events(run(*options, "--cache", name)[1]) for name in ("contiguous", kind))
    assert (other[0]["cache"]["kind"], other[-1]["text"]) == (kind, plain[-1]["text"])


def test_a_window_that_the_model_has_not_is_told(run, tiny_gqa):
    assert "no sliding windows" in run("--model", tiny_gqa, "--cache", "window", "-p", "hi", "-n", "2")[2]
    assert "no sliding windows" not in run("--model", tiny_gqa, "-p", "hi", "-n", "2")[2]


def test_a_cache_in_a_file_and_one_with_sinks_are_asked_for_by_their_own_options(run, tiny_gqa, tmp_path):
    options = ("--model", tiny_gqa, "-p", "hi", "--temp", 0, "--dtype", "float32", "-n")
    plain = run(*options, 16)[1]
    assert run(*options, 16, "--cache", "offload", "--cache-dir", tmp_path)[1] == plain
    _, _, err = run(*options, 100, "--sinks", 4, "-c", 64)
    held, capacity = map(int, re.search(r"cache sinks (\d+)/(\d+) tokens", err).groups())
    assert held <= capacity == 64 and SUMMARY.fullmatch(err.strip())[7] in ("length", "eos")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cache-dir", "."], "--cache-dir is for --cache offload, and this is contiguous"),
        (["--cache", "offload", "--cache-dir", "nowhere"], "nowhere: No such file or directory"),
        (["--sinks", "4", "--cache", "int8"], "cannot be int8 too"),
        (["--sinks", "-4"], "must be from 0 to half"),
        (["--draft", "nowhere"], "nowhere: no such"),
    ],
)
def test_options_of_the_cache_that_do_not_agree_are_refused_in_a_line(run, tiny_gqa, options, said):
    code, out, err = run("--model", tiny_gqa, "-p", "hi", *options)
    assert (code, out) == (2, "") and said in err


@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_an_answer_is_the_same_with_a_draft(run, tiny_gqa, draft):
    options = ("--model", tiny_gqa, "-p", "abcabcabcabc", "--temp", 0, "-n", 60, "--dtype", "float32", "--stats", "off")
    assert run(*options, "--draft", tiny_gqa if draft == "itself" else draft) == run(*options)


def test_compiling_without_a_compiler_is_refused_in_words(tiny_gqa, tmp_path):
    nowhere = {"CXX": str(tmp_path / "none"), "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    process = start("--model", tiny_gqa, "-p", "hi", "--compile", "--device", "cpu", env=environment(**nowhere))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, b"")
    assert is_one_line(err.decode(), "--compile: torch cannot (", "C++ compiler")


def test_a_draft_model_with_another_vocabulary_is_refused(run, tiny_gqa, successor):
    code, _, err = run("--model", tiny_gqa, "-p", "hi", "--draft", successor)
    assert code == 2 and "its vocabulary has 260 tokens and the model's 259" in err


def test_seed_repeats_an_answer_and_the_one_drawn_is_shown(run, tiny_gqa):
    def answer(*seed) -> tuple[str, str]:
        _, out, err = run("--model", tiny_gqa, "-p", "hi", "--temp", 1, "-n", 24, *seed)
        return out, SUMMARY.search(err)[8]

    assert answer("--seed", 5) == answer("--seed", 5)
    assert answer("--seed", 5)[0] != answer("--seed", 6)[0]
    text, seed = answer()
    assert answer("--seed", seed) == (text, seed)
    assert answer()[1] != seed


def test_one_answer_goes_on_from_a_session_that_was_kept(run, successor, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    conversation = Conversation(chat.open_session(chat.arguments(["--model", str(successor)])), Sampling(), Silence())
    conversation.say("hi")
    conversation.save("it")
    code, out, _ = run("--model", successor, "-p", "and?", "--json", "--load", "it")
    assert (code, events(out)[0]["reused_tokens"]) == (0, 32)
    code, out, err = run("--model", successor, "-p", "and?", "--load", "nothing")
    assert (code, out) == (2, "")
    assert is_one_line(err, "no session nothing", "/sessions")


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
    assert showing.of(used, reserved) == text


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
    contiguous = out[out.index("cache contiguous") :].split("\n\n")[0]
    lengths = re.findall(r"(\d+) tokens .*  (\d+) bytes$", contiguous, re.M)
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
    assert err == b"chat: No space left on device\n"
    with open("/dev/full", "wb") as full:
        process = start("--model", successor, "-p", "hi", "--stats", "summary", stderr=full)
        out, _ = process.communicate()
    assert (process.returncode, out) == (0, f"{ANSWER}\n".encode())


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


def test_ctrl_c_while_modules_are_imported_is_quiet(tmp_path):
    (tmp_path / "secrets.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    process = start("-p", "hi", env=environment(PYTHONPATH=str(tmp_path)))
    assert process.communicate() == (b"", b"")
    assert process.returncode == 130


def test_second_ctrl_c_does_not_wait_for_the_first():
    session = SimpleNamespace(interrupted=False)
    session.interrupt = lambda: setattr(session, "interrupted", True)
    before = signal.getsignal(signal.SIGINT)  # a shell's background job ignores it
    with showing.interruptible(session):
        signal.raise_signal(signal.SIGINT)
        assert session.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # and a third one breaks nothing
    assert signal.getsignal(signal.SIGINT) is before


# ---- the live line


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


def show(mode: type[showing.Stats], pieces: list[str], screen: Xterm) -> list[bool]:
    """Show an answer made of ``pieces``; whether a live line stood on the screen after each."""
    cache = SimpleNamespace(kind="contiguous", held=9, capacity=512, bytes_used=9 * 2080, bytes_reserved=512 * 2080)
    session = SimpleNamespace(cache=cache, last=Turn(3, 0, 1, "eos", "".join(pieces), len(pieces), 0.1, 0.1, 3))
    output, seen = showing.TextOutput(mode), []
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
        for mode in (showing.Summary, showing.Live):
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
    assert show(showing.Live, ["abc", "日本", "x" * 33, "y"], screen(40, 6)) == [True, True, False, True]


def test_live_line_of_an_answer_that_is_redirected(screen, monkeypatch, capsys):
    redirected = sys.stdout
    made = screen(60, 5)
    monkeypatch.setattr(sys, "stdout", redirected)
    assert show(showing.Live, ["abc", "\x1b[31m"], made) == [True, True]
    assert capsys.readouterr().out == "abc\x1b[31m\n"  # as the model said it
    assert made.shown[0].startswith("[prompt 3 new")
    assert not any("[cache" in line for line in made.shown)


def test_live_and_colour_need_a_terminal_that_can(screen, monkeypatch):
    screen(80, 24)
    assert showing.stats_for(None) is showing.stats_for("live") is showing.Live
    assert showing.Live().dim == "\x1b[2m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert showing.Live().dim == ""
    monkeypatch.setenv("TERM", "dumb")
    assert showing.stats_for(None) is showing.stats_for("live") is showing.Summary


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
        ("-p hi --interactive <&-", 2, "chat: --interactive needs a terminal.*"),
        ("--raw --system S -p hi </dev/null", 2, "chat: --system needs .*"),
    ],
)
def test_closed_streams_end_without_a_traceback(successor, redirection, code, err):
    command = f"{sys.executable} {CHAT} --model {successor} --stats summary {redirection}"
    options = {"capture_output": True, "text": True, "env": environment(), "timeout": 60, "start_new_session": True}
    done = subprocess.run(["bash", "-c", command], **options)
    assert (done.returncode, bool(re.fullmatch(err, done.stderr.rstrip("\n")))) == (code, True)
