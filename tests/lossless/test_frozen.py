"""The tokens and the steps of sixty runs are those that earlier versions wrote (see `frozen`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lossless import frozen
from tokenswift.models import target as targets

KEPT = json.loads(frozen.FILE.read_text(encoding="utf-8"))
BEST_FIRST = [
    pytest.param(kind, marks=[pytest.mark.slow] if place else []) for place, kind in enumerate(frozen.kinds())
]


def test_all_kinds_hold_sixty_runs() -> None:
    assert set(KEPT) == set(frozen.KINDS)
    assert all(len(runs) == 60 for runs in KEPT.values())


@pytest.mark.model
@pytest.mark.parametrize("dtype", frozen.DTYPES)
@pytest.mark.parametrize(
    "kind",
    [kind if i == 0 else pytest.param(kind, marks=pytest.mark.slow) for i, kind in enumerate(frozen.kinds())],
)
def test_runs_are_as_they_were(kind: str, dtype: str, embedded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_backends", {})
    if not frozen.use(kind):
        pytest.skip("no C compiler here")
    expected = {name: digest for name, digest in KEPT[kind].items() if name.split()[2] == dtype}
    assert Path(embedded).is_dir() and dict(frozen.runs(dtype)) == expected
