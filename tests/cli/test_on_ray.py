"""``tokenswift generate --prompts … --ray``: what is refused before any work, and what is told at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tokenswift.cli import many

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "argv,words",
    [
        (("--actors", "2"), "--actors is given without --ray; valid: both"),
        (("--actor-gpus", "1"), "--actor-gpus is given without --ray; valid: both"),
        (("--ray", "local", "--actors", "0"), "--actors is 0; valid: "),
        (("--ray", "local", "--out", "p"), "--out is 'p': it is not a folder"),
        (("--ray", "local", "--out", "nosuch://x"), "nosuch://x cannot be used (Protocol not known"),
        (("--out", "file:///x"), "--out is 'file:///x': an address; valid: a folder, or the same with --ray"),
    ],
)
def test_bad_options(cli: Call, argv: tuple[str, ...], words: str) -> None:
    Path("p").write_text('{"prompt": "a"}\n', encoding="utf-8")
    done = cli("generate", "--prompts", "p", "--out", "out", *argv)
    assert done.code == 2 and done.error.startswith(words), done


def test_without_ray_the_extra_is_named(cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "find_spec", lambda name: None)
    Path("p").write_text('{"prompt": "a"}\n', encoding="utf-8")
    done = cli("generate", "--prompts", "p", "--out", "out", "--ray", "local")
    assert (done.code, done.error) == (
        2,
        "the package ray is not installed; valid: pip install 'tokenswift-exact[ray]'",
    )
