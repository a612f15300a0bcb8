"""What nodes find out about a folder, and how actors are laid out on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenswift.runs import folder as folders

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")
cluster: Any = pytest.importorskip("tokenswift.distributed.cluster")


def test_a_folder_seen_by_all_and_one_that_is_not(tmp_path: Path) -> None:
    probe = tmp_path / "out" / "probe"
    assert cluster.look(str(probe), "a", ()) == ""
    lock = folders.Lock(probe)
    assert cluster.look(str(probe), "b", ("a",)) == ""
    assert cluster.look(str(probe), None, ("a", "b")) == ""
    assert "does not see what another node wrote" in cluster.look(str(probe), None, ("a", "c"))
    (probe / "b").write_text("another's", encoding="utf-8")
    assert "does not see what another node wrote" in cluster.look(str(probe), None, ("b",))
    lock.release()
    assert "does not see a lock" in cluster.look(str(probe), None, ("a",))
    assert cluster.look(f"file://{probe}", None, ("a",)) == ""
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "cannot write or read there" in cluster.look(str(tmp_path / "file" / "probe"), "a", ())


def node(cores: float, gpus: int = 0) -> dict[str, Any]:
    return {"Resources": {"CPU": cores} | ({"GPU": gpus} if gpus else {})}


@pytest.mark.parametrize(
    "have,prompts,given,expected",
    [
        ([node(8), node(8)], 100, (None, None, None, None), (2, 8, 0, 16)),
        ([node(8), node(4)], 100, (None, None, None, None), (3, 4, 0, 16)),
        ([node(8), node(8)], 3, (None, None, None, None), (2, 8, 0, 2)),
        ([node(8), node(8)], 100, (None, 2, None, 4), (8, 2, 0, 4)),
        ([node(8), node(8)], 100, (3, 2, None, None), (3, 2, 0, 16)),
        ([node(16, 4), node(16)], 100, (None, None, None, None), (4, 4, 1, 16)),
        ([node(16, 4), node(16)], 100, (None, None, 2, None), (2, 8, 2, 16)),
        ([node(16, 4), node(16)], 100, (None, 8, 0, None), (4, 8, 0, 16)),
        ([{"Resources": {}}, node(2)], 1, (None, None, None, None), (1, 2, 0, 1)),
    ],
)
def test_actors_fill_the_cluster(
    have: list[Any], prompts: int, given: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "nodes", lambda: have)
    assert cluster.laid_out(prompts, *given) == cluster.Actors(*expected)
