"""Weights of other methods: found in a checkout; without it one line says where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Call, cli  # noqa: F401
from tests.conftest import tiny_model
from tokenswift.loader import draft, shipped
from tokenswift.spec.heads.files import resolve_heads
from tokenswift.types import InputError

WHERE = "benchmarks/data of a checkout of the repository has it, scripts/train_rivals.sh there trains it"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without a checkout."""
    monkeypatch.setattr(shipped, "RIVALS", tmp_path / "none")


def test_an_installation_says_where_they_are(wheel: None, tmp_path: Path) -> None:
    assert [entry.name for entry in shipped.weights(".safetensors")] == ["smollm2-135m.heads.safetensors"]
    for kind in ("linear", "medusa"):
        with pytest.raises(InputError, match=f"no {kind} heads are shipped for .*{WHERE}"):
            resolve_heads(kind, tiny_model())
    with pytest.raises(InputError, match=f"{draft.NAME} is not part of this installation .{WHERE}"):
        draft.ensure(tmp_path)
