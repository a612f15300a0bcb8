"""Clients with different keys do not see each other: no answer, and no prompt by its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Start

ONE, OTHER = "key-of-one-client", "key-of-another-one"
CALL: dict[str, Any] = {
    "input": "hello",
    "max_output_tokens": 5,
    "seed": 3,
    "tokenswift": {"ignore_eos": True},
}
SHARED = "What everybody begins with, and which is long enough to be worth a copy. " * 3


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (tmp_path / "keys").write_text(f"{ONE}\n{OTHER}\n")
    return str(tmp_path / "keys")


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_an_answer_belongs_to_its_key(start: Start, keys: str, slowed: Any) -> None:
    llm, slow = slowed
    slow.pause = 0.01
    server = start(llm, api_key_file=keys)
    body = {**CALL, "max_output_tokens": 400, "background": True}
    name = server.post("/v1/responses", body, headers=shown(ONE)).json()["id"]
    nothing = server.get(f"/v1/responses/resp_{'0' * 32}", headers=shown(OTHER))
    for found in (
        server.get(f"/v1/responses/{name}", headers=shown(OTHER)),
        server.get(f"/v1/responses/{name}?stream=true", headers=shown(OTHER)),
        server.post(f"/v1/responses/{name}/cancel", headers=shown(OTHER)),
    ):
        assert found.status_code == 404 == nothing.status_code
        wanted = nothing.json()["error"]["message"].replace("0" * 32, name.removeprefix("resp_"))
        assert found.json()["error"]["message"] == wanted, "it says that there is something"
    goes_on = {**CALL, "previous_response_id": name}
    assert "there is no response" in server.post("/v1/responses", goes_on, headers=shown(OTHER)).text
    assert httpx.delete(f"{server.url}/v1/responses/{name}", headers=shown(OTHER)).is_error
    own = server.get(f"/v1/responses/{name}", headers=shown(ONE)).json()
    assert own["status"] in ("queued", "in_progress"), "another client has stopped it"
    assert server.post(f"/v1/responses/{name}/cancel", headers=shown(ONE)).json()["status"] == "cancelled"
    slow.pause = 0.0


@pytest.mark.parametrize("share", [False, True])
def test_a_prompt_is_read_anew_for_another_key(start: Start, keys: str, share: bool) -> None:
    """Or its time would tell that somebody asked the same."""
    server = start(api_key_file=keys, share_prefixes=share)

    def reused(key: str) -> int:
        body = {"prompt": SHARED, "max_tokens": 3, "tokenswift": {"ignore_eos": True}}
        before = server.answers.scheduler.figures().reused
        assert server.post("/v1/completions", body, headers=shown(key)).status_code == 200
        return server.answers.scheduler.figures().reused - before

    assert reused(ONE) == 0 and (reused(OTHER) > 0) == share
    assert reused(ONE) > 0 and reused(OTHER) > 0
