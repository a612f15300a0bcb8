"""Weights of other methods: found in a checkout; without it one line says where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Call, cli  # noqa: F401
from tests.conftest import tiny_model
from tokenswift.loader import draft, shipped
from tokenswift.spec.heads.resolve import resolve_heads
from tokenswift.types import InputError

WHERE = "benchmarks/data of a checkout of the repository has it, scripts/train_rivals.sh there trains it"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without a checkout."""
    monkeypatch.setattr(shipped, "RIVALS", tmp_path / "none")


def test_a_checkout_has_all() -> None:
    names = [entry.name.removeprefix("smollm2-135m.") for entry in shipped.weights(".safetensors")]
    assert names == [f"{kind}safetensors" for kind in ("draft.", "heads.", "linear.heads.", "medusa.heads.")]
    assert shipped.where() == "" and (shipped.RIVALS.parents[1] / "scripts" / "train_rivals.sh").is_file()
    assert not [entry for entry in shipped.RIVALS.iterdir() if entry.name == "smollm2-135m.heads.safetensors"]


def test_an_installation_says_where_they_are(wheel: None, tmp_path: Path) -> None:
    assert [entry.name for entry in shipped.weights(".safetensors")] == ["smollm2-135m.heads.safetensors"]
    for kind in ("linear", "medusa"):
        with pytest.raises(InputError, match=f"no {kind} heads are shipped for .*{WHERE}"):
            resolve_heads(kind, tiny_model())
    with pytest.raises(InputError, match=f"{draft.NAME} is not part of this installation .{WHERE}"):
        draft.ensure(tmp_path)


@pytest.mark.parametrize("heads", ["auto", "medusa"])
def test_the_command_line_ends_before_a_model_is_loaded(cli: Call, wheel: None, heads: str) -> None:  # noqa: F811
    done = cli("generate", "hi", "--strategy", "medusa", "--heads", heads)
    assert done.code == 2 and WHERE in done.error and "loading" not in done.err
