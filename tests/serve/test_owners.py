"""Clients with different keys do not see each other: no answer, no prompt by its time, no id in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Start
from tokenswift.engine.sequence import Sequence
from tokenswift.serve.store import Store, brief
from tokenswift.types import RunError

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


@pytest.mark.parametrize("fault", ["record", "journal", "disk", "scheduler"])
def test_the_log_has_no_ids_where_something_is_wrong(
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Errors name folders, and an answer's folder has its id for a name."""
    folder = tmp_path / "answers"
    server = start(run_dir=str(folder))
    name = server.post("/v1/responses", CALL).json()["id"]
    server.close()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise (ValueError if fault == "scheduler" else RunError)(f"it failed in {folder / name}")

    if fault == "record":
        (folder / name / "answer.json").write_text("{}")
    elif fault == "journal":
        journal = folder / name / "0" / "journal"
        journal.write_bytes(journal.read_bytes().replace(b'"ids"', b'"idz"'))
    elif fault == "disk":
        monkeypatch.setattr(Store, "write", fails)
    else:
        monkeypatch.setattr(Sequence, "take", fails)
    again = start(run_dir=str(folder))
    if fault in ("record", "journal"):
        again.get(f"/v1/responses/{name}")
    else:
        again.post("/v1/responses", {**CALL, "seed": 4})
    again.close()
    said = caplog.text
    assert str(folder) in said, "nothing was said"
    assert name.removeprefix("resp_") not in said and f"resp_{brief(name)[-9:]}" in said
