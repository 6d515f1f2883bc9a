"""Many processes act as one model: the tokens of one, whatever happens to a rank."""

import json

import pytest
from conftest import HEADS, tiny_folder
from ranks import answers, started


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    made, small = tmp_path_factory.mktemp("models"), {"num_hidden_layers": 2}
    for name, (heads, kv_heads) in HEADS.items():
        tiny_folder(made / name, num_attention_heads=heads, num_key_value_heads=kv_heads, **small)
    tiny_folder(made / "tied", tie_word_embeddings=True, **small)
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
