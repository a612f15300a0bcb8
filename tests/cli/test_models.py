"""``tokenswift models``, and names of models in other commands."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.cli.conftest import Call
from tokenswift.cli.models import ModelRecord
from tokenswift.cli.options import drafter_line
from tokenswift.engine.llm import LLM
from tokenswift.loader.named_models import GEMMA, NAMED_MODELS, QWEN, QWEN_SMALL

pytestmark = pytest.mark.usefixtures("own_cache")


def listed(cli: Call) -> dict[str, ModelRecord]:
    done = cli("models", "--json")
    assert done.code == 0
    records: list[ModelRecord] = [json.loads(line) for line in done.out.splitlines()]
    return {record["name"]: record for record in records}


def test_every_named_model_is_listed_in_80_columns(cli: Call) -> None:
    done = cli("models")
    assert all(name in done.out for name in NAMED_MODELS)
    assert max(map(len, done.out.splitlines())) <= 80


def test_records_say_what_a_model_takes(cli: Call) -> None:
    record = listed(cli)[QWEN.name]
    assert record["size"] == QWEN.size
    assert record["memory"] == QWEN.memory
    assert record["licence"] == "Apache-2.0"


def test_the_docs_say_what_a_model_takes_as_the_command_does(cli: Call) -> None:
    page = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    said = {row[0].strip("`"): row[2:4] for row in rows}
    for line in cli("models").out.splitlines():
        name, *_ = line.split(" ")
        if name in NAMED_MODELS:
            assert f"   {said[name][0]}   " in line
            assert ("   yes   " in line) == (said[name][1] == "yes")


def test_a_model_is_in_the_cache_when_all_of_its_file_is(cli: Call, own_cache: Path) -> None:
    assert listed(cli)[QWEN_SMALL.name]["path"] is None
    path = QWEN_SMALL.path(own_cache)
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(QWEN_SMALL.size)
    assert listed(cli)[QWEN_SMALL.name]["path"] == str(path)


def test_drafters_of_the_package_are_listed(cli: Call) -> None:
    records = listed(cli)
    for model in (QWEN, QWEN_SMALL):
        assert str(records[model.name]["drafter"]).endswith(model.file)
    assert records[GEMMA.name]["drafter"] is None


def test_a_drafter_that_the_user_trained_is_listed(cli: Call, own_cache: Path) -> None:
    mine = own_cache / "drafters" / f"{QWEN_SMALL.name}.gguf"
    mine.parent.mkdir()
    mine.write_bytes(b"")
    assert listed(cli)[QWEN_SMALL.name]["drafter"] == str(mine)


@pytest.mark.parametrize(
    ("has_drafter", "options", "line"),
    [
        (True, {"strategy": "auto", "eagle": "auto"}, "drafter: trained for this model"),
        (True, {"eagle": "auto"}, "drafter: trained for this model"),
        (True, {"strategy": "auto", "eagle": "mine.gguf"}, "drafter: mine.gguf"),
        (True, {"strategy": "autoregressive", "eagle": "auto"}, ""),
        (False, {"strategy": "auto", "eagle": "auto"}, ""),
    ],
)
def test_the_drafter_is_said_at_the_start(
    has_drafter: bool, options: dict[str, str], line: str
) -> None:
    eagle = object() if has_drafter else None
    llm = cast(LLM, SimpleNamespace(resources=SimpleNamespace(eagle=eagle)))
    assert drafter_line(llm, argparse.Namespace(**options)) == line
