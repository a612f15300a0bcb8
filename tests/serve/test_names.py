"""The name of a model for clients."""

from __future__ import annotations

import pytest

from tests.serve.conftest import Start
from tokenswift import LLM


def test_a_snapshot_of_the_hub_has_the_name_of_its_repository(
    llm: LLM, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "_name", f"/hub/models--owner--a-name/snapshots/{'0a' * 20}")
    client = start().client()
    (model,) = client.models.list().data
    assert model.id == "owner/a-name"
    assert client.models.retrieve("owner/a-name").id == "owner/a-name"
