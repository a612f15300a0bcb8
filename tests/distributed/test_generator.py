"""The actor, without Ray: rows become texts, and journals of dead actors are gone on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import chatty_model
from tokenswift import LLM, InputError
from tokenswift.distributed import Generator
from tokenswift.runs import folder as folders

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")
HOW: dict[str, Any] = {"strategy": "autoregressive", "ignore_eos": True, "max_new_tokens": 30}
ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "Once upon a time", "seed": 3},
    {"id": "b", "prompt": "x", "max_new_tokens": 5},
    {"id": "c", "messages": [{"role": "user", "content": "Hello"}]},
    {"id": "d", "prompt": "Once upon a time", "greedy": True, "stop": ["q"]},
]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty_model(tmp_path_factory.mktemp("chatty"), 256)


@pytest.fixture
def make(chatty: Path, own_cache: Path) -> Iterator[Callable[..., Generator]]:
    """Makes actors; their schedulers end with the test."""
    generators: list[Generator] = []

    def call(out: object, **settings: Any) -> Generator:
        settings = {**HOW, "loading": {"threads": 1}, **settings}
        generators.append(Generator(str(out), str(chatty), **settings))
        return generators[-1]

    yield call
    for generator in generators:
        generator._scheduler.close()


def table(rows: list[dict[str, Any]]) -> Any:
    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})


def alone(chatty: Path, row: dict[str, Any], **how: Any) -> Any:
    more = {key: value for key, value in row.items() if key not in ("id", "prompt", "messages")}
    with LLM(chatty, threads=1) as llm:
        return llm.generate(row.get("prompt") or row["messages"], **{**HOW, **how, **more})


def begin(chatty: Path, row: dict[str, Any], folder: Path, steps: int) -> int:
    """Leave a row's run as an actor does that dies after some steps; how many tokens its journal
    has."""
    more = {key: value for key, value in row.items() if key not in ("id", "prompt")}
    with LLM(chatty, threads=1) as llm:
        with llm.stream(row["prompt"], **{**HOW, **more}, run_dir=folder) as stream:
            for _, _ in zip(range(steps), stream, strict=False):
                pass
    return len(folders.load(folder)[1].tokens)


def test_each_row_is_what_its_prompt_is_alone(
    make: Callable[..., Generator], chatty: Path, tmp_path: Path
) -> None:
    rows = make(tmp_path / "out", seed=8)(table(ROWS)).to_pylist()
    for row, prompt in zip(rows, ROWS, strict=True):
        expected = alone(chatty, prompt, **({} if "seed" in prompt else {"seed": 8}))
        state = folders.load(tmp_path / "out" / prompt["id"])[1]
        assert state.tokens == expected.token_ids, prompt
        assert (row["text"], row["finish_reason"]) == (expected.text, expected.finish_reason)
        assert (row["new_tokens"], row["error"]) == (len(expected.token_ids), None)
        assert (tmp_path / "out" / prompt["id"] / "text.txt").read_bytes().decode(
            "utf-8"
        ) == expected.text


def test_a_second_actor_goes_on_inside_a_row_and_leaves_what_is_finished(
    make: Callable[..., Generator], chatty: Path, tmp_path: Path
) -> None:
    known = begin(chatty, ROWS[0], tmp_path / "out" / "a", 7)
    (first,) = make(tmp_path / "out")(table(ROWS[1:2])).to_pylist()
    earlier = folders.load(tmp_path / "out" / "a")[1]
    assert 0 < known < 30
    assert first["error"] is None
    before = (tmp_path / "out" / "b" / "journal").read_bytes()
    rows = make(tmp_path / "out")(table(ROWS[:2])).to_pylist()
    assert rows[0]["text"] == alone(chatty, ROWS[0]).text
    state = folders.load(tmp_path / "out" / "a")[1]
    assert len(state.sessions) == 2
    assert state.steps[:known] == earlier.steps
    assert (tmp_path / "out" / "b" / "journal").read_bytes() == before
    assert rows[1]["text"] == first["text"]


def test_a_row_that_is_wrong_fails_alone(make: Callable[..., Generator], tmp_path: Path) -> None:
    rows = [
        {"prompt": "no id"},
        {"id": "../x", "prompt": "a"},
        {"id": "f", "prompt": "a", "min_p": -1.0},
        ROWS[1],
    ]
    rows_with_texts = make(tmp_path / "out")(table(rows)).to_pylist()
    for row, word in zip(
        rows_with_texts, ["a row has no id", "id is '../x'", "min_p is -1.0"], strict=False
    ):
        assert word in row["error"], row
        assert row["text"] is None
    assert rows_with_texts[-1]["error"] is None
    assert rows_with_texts[-1]["new_tokens"] == 5
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["b"]


def test_the_only_node_makes_the_folder(make: Callable[..., Generator], tmp_path: Path) -> None:
    """With those above it; what is no folder is said."""
    out = tmp_path / "new" / "out"
    make(out)
    assert out.is_dir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"^out is '.*file/out': it cannot be made \(Not a direct"):
        make(tmp_path / "file" / "out")


def test_a_node_that_does_not_see_the_folder_is_named(
    make: Callable[..., Generator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are others nothing is made, and the line says what to do."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}, {"Alive": True}])
    says = (
        r"^out is '.*other': node .* of 2 does not see it; valid: a folder .*\(mkdir -p .*other on"
    )
    with pytest.raises(InputError, match=says):
        make(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    (tmp_path / "other").mkdir()
    make(tmp_path / "other")
