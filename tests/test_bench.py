"""bench.py: it measures what it says, and refuses in words what it cannot measure."""

import json
import sys

import pytest
from conftest import successor_folder

import bench


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nowhere"], "nowhere: no such model folder"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--plot", "x.png", "--to", "600"], "needs a context of 632 tokens, and there are 512"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(arguments, said, successor, monkeypatch, capsys):
    model = [] if "--model" in arguments else ["--model", str(successor)]
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments, *model])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_each_engine_is_measured_in_its_own_process(tmp_path, monkeypatch, capsys):
    folder = successor_folder(tmp_path / "model", {}, context=1024)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--model", str(folder), "--rounds", "1", "--json"])
    assert bench.main() == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"cached", "recomputed"}
    for row in result.values():
        figures = ("load_s", "prefill_512", "decode_32", "decode_512", "peak_mib", "threads")
        assert all(row[name] > 0 for name in figures)


def test_answers_together_are_measured_beside_single_ones(tiny_gqa, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--model", str(tiny_gqa), "--batch", "--rounds", "1"])
    assert bench.main() == 0
    speeds, waste = capsys.readouterr().out.splitlines()
    assert float(speeds.split()[-2]) > 1
    assert float(waste.split()[-2]) < 4
