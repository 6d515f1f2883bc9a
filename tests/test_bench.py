"""bench.py: it measures what it says, and refuses in words what it cannot measure."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, successor_folder, tiny_folder, token_of
from safetensors import safe_open

import bench
from cache import make
from generate import Sampling, Session, passes
from measure.drafts import compared, print_drafts
from measure.engines import Roof, Silent, Subject
from measure.peers import LLAMA_CPP, TRANSFORMERS, LlamaCpp, PeerError, Transformers, write_gguf
from measure.plots import cache_sizes, refusal
from model import Config, Llama, load, random_model
from weights.get import half_split, tensor_names

SHAPE = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def run(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, arguments)])
    return bench.main()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nowhere"], "nowhere: no such model folder"),
        (["--synthetic", "llama-9"], "llama-9: no such file"),
        (["--rounds", "0"], "--rounds: must be at least 1"),
        (["--contexts", "128", "0"], "--contexts: must be at least 1"),
        (["--plot", "x.png", "--to", "127"], "--to: must be at least 128"),
        (["--caches", "--text", "543"], "--text: must be at least 544"),
        (["--caches", "--restore", "0"], "--restore: must be at least 1"),
        (["--caches", "--text", str(10**15)], "are free\n"),
        (["--contexts", "600"], "needs a context of 632 tokens, and there are 512"),
        (["--plot", "x.png", "--to", "600"], "needs a context of 632 tokens, and there are 512"),
        (["--plot", "x.png", "--rows", "paged"], "--plot needs the rows contiguous and none"),
        (["--plot", "nowhere/x.png"], "--plot nowhere: no such folder"),
        (["--plot", "tests/"], "--plot tests is a folder"),
        (["--plot", "x"], "--plot x: a figure's name ends in one of ."),
        (["--plot", "x.docx"], "--plot x.docx: a figure's name ends in one of ."),
        (["--caches", "--synthetic", "llama-3.2-1b"], "--caches does not go with --synthetic"),
        (["--model", "nowhere", "--synthetic", "llama-3.2-1b"], "--synthetic does not go with --model"),
        (["--batch", "--caches"], "--batch does not go with --caches"),
        (["--batch", "--compile"], "--batch does not go with --compile"),
        (["--caches", "--drafts"], "--caches does not go with --drafts"),
        (["--drafts", "--synthetic", "llama-3.2-1b"], "--drafts does not go with --synthetic"),
        (["--drafts", "--plot", "x.png"], "--drafts does not go with --plot"),
        (["--caches", "--ranks"], "--caches does not go with --ranks"),
        (["--ranks", "--peers"], "--ranks does not go with --peers"),
        (["--text", "600"], "--text needs --caches"),
        (["--to", "256"], "--to needs --plot"),
        (["--ranks"], "--ranks needs torchrun: torchrun --nproc-per-node 3 bench.py --ranks"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(arguments, said, successor, monkeypatch, capsys):
    monkeypatch.chdir(Path(bench.__file__).parent)
    model = [] if {"--model", "--synthetic"} & {*arguments} else ["--model", successor]
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments, *model)
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.count("\n") == 1 and not told.out


def test_a_figure_is_refused_where_it_cannot_be_written(tmp_path, monkeypatch):
    assert refusal(tmp_path / "x.PNG") is None
    monkeypatch.setattr("os.access", lambda *_: False)
    assert refusal(tmp_path / "x.png") == f"{tmp_path / 'x.png'} cannot be written"


def test_several_processes_do_not_measure_the_same(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--batch")
    assert ended.value.code == 2
    assert "torchrun is for --ranks" in capsys.readouterr().err


def test_a_figure_that_fails_does_not_lose_the_table(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    result = {"model": "m", "dtype": "float32", "hardware": "h", "steps_ms": {}, "cache_bytes": {}}
    monkeypatch.setattr(bench, "measured", lambda args: (result, print))
    monkeypatch.setattr(bench, "draw", full)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--plot", tmp_path / "x.png", "--json")
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert json.loads(told.out) == result
    assert told.err == f"bench: {tmp_path / 'x.png'}: No space left on device\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("contexts", [(8,), (8, 64)])
def test_longer_steps_are_told_where_there_are_any(contexts, capsys):
    class Loaded:
        load_s, subject = 2.0, Subject(None, SHAPE)

    runs = {n: [{"first_s": 0.1, "step_s": 0.01 * n, "bytes": 1000 * n, "peak": 7}] for n in contexts}
    row = bench.figures(Loaded, runs, 8, 10**9, {"bandwidth": 1e9, "operations": 1e10})
    about = dict.fromkeys(("model", "dtype", "hardware", "date", "rounds", "torch", "threads"), "x")
    nothing = {"compiled": False, "startup": None, "load_gb_s": None, "ratios": {}}
    machine = {"bandwidth": 1e9, "operations": 1e10}
    bench.print_table(about | nothing | {"machine": machine, "prompt": 8, "rows": {"contiguous": row}})
    table = capsys.readouterr().out
    assert ("longer steps" in table) == ("Longer steps" in table) == (len(contexts) > 1)
    assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1


def test_random_weights_are_measured_and_drawn(tmp_path, monkeypatch, capsys):
    shape, plot = tmp_path / "config.json", tmp_path / "plot.png"
    shape.write_text(json.dumps(SHAPE))
    rows = "--rows", "contiguous", "none"
    options = "--rounds", "1", "--contexts", "128", "600", "--plot", plot, "--to", "128"
    assert run(monkeypatch, "--synthetic", shape, *rows, *options, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["rows"]) == {"contiguous", "none"}
    assert result["prompt"] == 128  # a longer one is read once, and not to be timed
    for name, row in result["rows"].items():
        assert set(row["decode"]) == ({"128"} if name == "none" else {"128", "600"})
        assert all(row[key] > 0 for key in ("load_s", "first_token_s", "prefill_tok_s", "prefill_share", "peak_bytes"))
        assert all(step[key] > 0 for step in row["decode"].values() for key in ("step_s", "gb_s", "share"))
    assert "longer" in result["rows"]["contiguous"]["decode"]["600"]
    assert set(result["ratios"]) == {"none"}
    assert result["load_gb_s"] > 0
    assert set(result["steps_ms"]) == {"contiguous", "none"}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_start_is_measured_to_its_first_letter(successor):
    times = bench.startup(Subject(str(successor)), 1)
    assert times["first_token_s"] > 0 < times["import_torch_s"]
    assert times["beyond_s"] == times["first_token_s"] - times["import_torch_s"]


def test_an_engine_that_stops_is_left_out(capsys):
    running = bench.Run({"paged": Subject("nowhere")}, 10)
    assert not running.engines
    assert capsys.readouterr().err == "bench: paged is left out: nowhere: no such model folder\n"


def test_a_dtype_without_fast_kernels_is_measured_once(monkeypatch):
    calls, slow = [], torch.float16

    def seconds(self, product, times):
        dtype = product.args[0].dtype
        calls.append((dtype, times))
        return 11.0 if dtype is slow else 1.0

    monkeypatch.setattr(Roof, "_bandwidth", lambda self, size: 1.0)
    monkeypatch.setattr(Roof, "_seconds", seconds)
    roof = Roof("roof", Subject(None))
    answers = [roof.answer(), roof.answer()]
    assert answers[0] == answers[1]
    assert answers[0]["float32"] == answers[0]["bfloat16"] == pytest.approx(11 * answers[0]["float16"])
    assert [times for dtype, times in calls if dtype is slow] == [2]


def test_figures_are_medians_and_shares_of_the_machine():
    def answers(first: float, step: float, read: int) -> list[dict]:
        return [{"first_s": first, "step_s": step * x, "bytes": read, "peak": 7} for x in (1, 0.5, 2)]

    class Loaded:
        load_s, subject = 2.0, Subject(None, SHAPE)

    runs = {100: answers(0.1, 0.01, 10**6), 500: answers(0.5, 0.03, 3 * 10**6)}
    row = bench.figures(Loaded, runs, 500, 10**9, {"bandwidth": 1e9, "operations": 1e10})
    assert row["prefill_tok_s"] == 1000
    assert row["prefill_share"] == pytest.approx(0.2)
    assert row["first_token_s"] == 0.1
    assert row["decode"][100] == {"step_s": 0.01, "tok_s": 100, "gb_s": 0.1, "share": pytest.approx(0.1)}
    assert row["decode"][500]["longer"] == pytest.approx(0.02 / 0.002)
    assert bench.ratios(runs, {100: runs[500]}, 100) == {"prefill": pytest.approx(5), "decode": {100: pytest.approx(3)}}


def test_answers_together_are_measured_beside_single_ones(tiny_gqa, monkeypatch, capsys):
    assert run(monkeypatch, "--model", tiny_gqa, "--batch", "--rounds", "1") == 0
    told = capsys.readouterr()
    assert not told.err  # which is no terminal
    speeds, waste = told.out.splitlines()
    assert float(speeds.split()[-2]) > 1
    assert float(waste.split()[-2]) < 4


def test_a_terminal_shows_how_far_a_run_is(tiny_gqa, monkeypatch, capsys):
    monkeypatch.setattr("measure.progress.escapes_work", lambda stream: True)
    assert run(monkeypatch, "--model", tiny_gqa, "--batch", "--rounds", "1") == 0
    lines = capsys.readouterr().err.split("\x1b[K")
    assert lines[:2] == ["\rwarm-up: one by one", "\rwarm-up: together"]
    assert lines[-3:] == ["\rround 1 of 1: together", "\r", ""]


def test_kinds_of_cache_are_compared(tiny_gqa, monkeypatch, capsys):
    assert run(monkeypatch, "--model", tiny_gqa, "--caches", "--rounds", "1", "--text", "560", "--restore", "64") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| `contiguous` | 384 | 131,072 | 1.00 × | 0 | +0.00 %")
    assert lines[-1].startswith("64 tokens: prefilled in ")


def test_answers_with_drafts_are_measured_beside_those_without(tmp_path, monkeypatch, capsys):
    a, b = map(token_of, b"ab")
    folder = successor_folder(tmp_path / "model", dict.fromkeys(range(VOCABULARY), a) | {a: b}, context=2048)
    assert run(monkeypatch, "--model", folder, "--drafts", "--rounds", "1", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [*result] == ["repeat a text", "edit a file", "story", "essay"]
    for row in result.values():
        assert row["tokens"] == 160 and row["differs_at"] is None
        assert 0 < row["accepted"] == row["drafted"]
        assert row["least"] == row["ratio"] == row["most"] == row["with_tok_s"] / row["without_tok_s"]


def test_what_drafts_gain_is_a_median_of_pairs(capsys):
    def answer(tokens: list[int], speed: float, drafted: int = 0) -> dict:
        return {"tokens": tokens, "tok_s": speed, "drafted": drafted, "accepted": drafted // 2}

    def pair(others: list[int], before: float, after: float, drafted: int) -> list[dict]:
        return [answer([5, 6, 7], before), answer(others, after, drafted)]

    row = compared([pair([5, 6, 7], 10, 20, 4), pair([5, 6], 20, 30, 4), pair([5, 6, 7], 5, 20, 4)])
    assert (row["without_tok_s"], row["with_tok_s"]) == (10, 20)
    assert (row["least"], row["ratio"], row["most"]) == (1.5, 2, 4)
    assert row["differs_at"] == 3
    print_drafts({"one": row, "other": compared([pair([5, 6, 7], 10, 10, 0)])})
    one, other = capsys.readouterr().out.splitlines()[2:]
    assert one == "| one | 3 | 10.0 | 20.0 | 2.00 × (1.50 to 4.00) | 50% of 12 | not from token 3 on |"
    assert other.endswith("| 1.00 × (1.00 to 1.00) | none drafted | yes |")


@pytest.mark.parametrize(("context", "said"), [(512, "and the context holds 512"), (2048, "an answer ends at once")])
def test_what_drafts_cannot_be_measured_on_is_said(context, said, tmp_path, monkeypatch, capsys):
    folder = successor_folder(tmp_path / "model", {}, context)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--model", folder, "--drafts", "--rounds", "1")
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.count("\n") == 1 and not told.out


# ---- shapes


@pytest.mark.parametrize(
    ("shape", "parameters"),  # as the model cards give them
    [("llama-3.2-1b", 1.24e9), ("llama-3.2-3b", 3.21e9), ("llama-3.1-8b", 8.03e9), ("llama-3.1-70b", 70.6e9)],
)
def test_shapes_are_those_of_the_published_models(shape, parameters):
    model = Llama(Config.from_json(bench.SHAPES[shape]))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_random_model_is_as_large_as_a_loaded_one(quantize):
    config = Config.from_json(SHAPE)
    model = random_model(config, quantize=quantize)
    assert model.dtype is torch.bfloat16
    assert sum(values.nbytes for values in model.parameters()) == Llama.bytes_for(config, torch.bfloat16, quantize)
    assert model.norm.weight.mean().item() == pytest.approx(1, abs=0.02)
    assert model.fingerprint == random_model(config, quantize=quantize).fingerprint


def test_drawn_bytes_are_those_that_the_caches_count():
    sizes = cache_sizes(Config.from_json(SHAPE), 640)
    assert {label: curve[640] for label, curve in sizes.items()} == {
        "MHA, 4 KV heads": 640 * 2 * 2 * 4 * 16 * 2,
        "GQA, 2 KV heads": 640 * 2 * 2 * 2 * 16 * 2,
        "MQA, 1 KV heads": 640 * 2 * 2 * 1 * 16 * 2,
        "GQA, int8": sizes["GQA, int8"][640],
        "GQA, int4": sizes["GQA, int4"][640],
    }
    assert sizes["GQA, int4"][640] < sizes["GQA, int8"][640] < sizes["GQA, 2 KV heads"][640]


# ---- peers


@pytest.mark.parametrize("row", TRANSFORMERS)
def test_transformers_goes_on_from_what_it_has_read(row, tiny_gqa):
    peer, ids = Transformers(row, Subject(str(tiny_gqa), dtype="float32")), [7 * i % 250 + 3 for i in range(40)]
    model = load(tiny_gqa)
    session = Session(model, make("contiguous", model.config, 64, "cpu", torch.float32), Silent())
    expected = [step.token for step in session.generate(ids, Sampling(temperature=0, max_tokens=4))]
    for held in (0, 39, 39):
        peer.open(40, held)
        token = peer.feed(ids[held:])
        assert [token, *(token := peer.feed([token]) for _ in range(3))] == expected
    answer = peer.answer(ids, 2, anew=False)
    assert answer["first_s"] > 0 < answer["step_s"]
    room = 64 + 8 if row == "transformers-static" else 42
    assert answer["bytes"] == peer.bytes_per_step + room * 2 * 3 * 2 * 8 * 4
    assert peer.bytes_per_step == pytest.approx(model.bytes_per_step, rel=0.01)


def test_peers_are_measured_on_the_same_weights_where_they_are_there(tiny_gqa, tmp_path, monkeypatch, capsys):
    subject = Subject(str(tiny_gqa), dtype="float32")
    monkeypatch.setattr(bench, "find_spec", lambda package: None)
    assert set(bench.peers_of(subject, tmp_path)) == {*TRANSFORMERS}
    assert "llama.cpp is left out: it is not installed" in capsys.readouterr().err
    monkeypatch.setattr(bench, "find_spec", lambda package: package)
    subjects = bench.peers_of(subject, tmp_path)
    assert set(subjects) == {*TRANSFORMERS, *LLAMA_CPP}
    sizes = [Path(subjects[row].weights).stat().st_size for row in LLAMA_CPP]
    assert sizes == sorted(sizes, reverse=True)
    rows = ["contiguous", "int8-weights", "paged", *subjects]  # nothing of ours is as small as q4_1 here
    assert bench.beside(rows) == dict.fromkeys((*TRANSFORMERS, "llama.cpp"), "contiguous") | {
        "llama.cpp-q8_0": "int8-weights"
    }


@pytest.fixture(scope="module")
def stretched(tmp_path_factory) -> Path:
    """A model whose slow pairs turn eight times slower, as Llama 3.1's do."""
    scaling = LLAMA3 | {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
    return tiny_folder(tmp_path_factory.mktemp("models") / "stretched", rope_parameters=scaling)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_a_gguf_file_holds_the_weights(kind, tiny_gqa, tmp_path):
    from gguf import GGUFReader
    from gguf.quants import dequantize

    write_gguf(tiny_gqa, tmp_path / "model.gguf", kind)
    reader, config = GGUFReader(tmp_path / "model.gguf"), Config.from_folder(tiny_gqa)
    names = tensor_names(asdict(config))
    assert {tensor.name for tensor in reader.tensors} == set(names)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    room = {"F32": 0, "F16": 1e-3, "BF16": 5e-3, "Q8_0": 1e-2, "Q4_1": 0.1}[kind]  # of the largest weight
    with safe_open(tiny_gqa / "model.safetensors", framework="pt") as file:
        for tensor in reader.tensors:
            values, part = dequantize(tensor.data, tensor.tensor_type), tensor.name.split(".")[-2]
            values = half_split(values, heads[part]) if part in heads else values
            stored = file.get_tensor(names[tensor.name])
            assert (torch.tensor(values) - stored).abs().max() <= room * stored.abs().max()
    assert reader.fields["llama.attention.head_count_kv"].contents() == 2


@pytest.mark.parametrize("folder", ["tiny_gqa", "stretched"])
def test_llama_cpp_computes_what_it_does(folder, request, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    folder, ids = request.getfixturevalue(folder), [7 * i % 250 + 3 for i in range(90)]
    write_gguf(folder, tmp_path / "model.gguf", "F32")
    llama_cpp.llama_backend_init()
    peer = LlamaCpp("llama.cpp", Subject(str(tmp_path / "model.gguf")))
    model = load(folder)
    (hidden,) = passes(model, make("contiguous", model.config, 90), ids, 90)
    expected = model.head(hidden[-1:])[0]
    peer.open(90, 0)
    logits = torch.tensor(peer.logits(ids))
    assert (logits - expected).abs().max() < 0.02 * expected.abs().max()  # its cache is in float16
    peer.open(90, 89)
    assert torch.allclose(torch.tensor(peer.logits(ids[89:])), logits, atol=0.01)
    assert peer.bytes_per_step == model.bytes_per_step


def test_what_llama_cpp_is_not_compared_on_is_said(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = tiny_folder(tmp_path / "model", rope_parameters=scaling)
    with pytest.raises(PeerError, match="not compared on rope_scaling of type dynamic"):
        write_gguf(folder, tmp_path / "model.gguf", "F32")


def test_each_of_its_rows_stands_beside_one_of_ours():
    assert {ours for _, ours in LLAMA_CPP.values()} <= set(bench.OURS)
