"""``tokenswift bench``: what it measures and how, and what is refused once the model is known."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Call

SMALL = ("--contexts", "24,48", "--repeats", "2", "-n", "6")


def test_measured_and_shown(cli: Call, tiny: Path) -> None:
    """Every rate is in the record."""
    done = cli("bench", "--model", tiny, *SMALL, "--heads", "none", "--json", "r.json")
    assert done.code == 0, done.err
    assert done.files == ["r.json"]
    record = json.loads(Path("r.json").read_text())
    assert (record["dtype"], record["device"], record["heads"]) == ("float32", "cpu", None)
    assert record["versions"]["torch"]
    assert [one["context"] for one in record["contexts"]] == [24, 48]
    for one in record["contexts"]:
        names = [f"{name}_tokens_per_second" for name in ("prompt", "plain", "adaptive")]
        assert one["identical"]
        assert all(len(one[name]) == 2 and min(one[name]) > 0 for name in names)
        pairs = zip(one[names[1]], one[names[2]], strict=True)
        assert one["speedup"] == [b / a for a, b in pairs]
    first, *_, last = done.out.splitlines()
    assert "float32 on cpu, no heads; " in first
    assert first.endswith("2 repeats, 6 new tokens")
    assert "plain, tokens/s" in done.out
    assert last.split()[0] == "48"
    assert last.split()[-1] == "yes"


def test_what_does_not_fit(cli: Call, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "cwd" / "t.txt").write_text("ab")
    for argv, words in (
        (
            "--contexts 240 -n 20",
            "prompt and new tokens are 260 tokens; valid: up to the model's 256",
        ),
        (
            "--contexts 50 --prompt-file t.txt",
            "--contexts is 50, the text has 2 tokens; valid: fewer",
        ),
    ):
        done = cli("bench", "--model", tiny, "--quiet", *argv.split())
        assert done.code == 2, done.err
        assert done.error.startswith(words)
        assert done.out == ""
