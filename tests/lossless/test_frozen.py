"""The tokens and the steps of ninety runs are those that earlier versions wrote (see `frozen`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lossless import frozen
from tokenswift.models import target as targets

KEPT = json.loads(frozen.FILE.read_text(encoding="utf-8"))


def test_each_type_has_thirty_runs() -> None:
    assert {name.split()[0] for name in KEPT} == set(frozen.DTYPES)
    assert all(len(runs) == 30 for runs in KEPT.values())


@pytest.mark.model
@pytest.mark.parametrize("dtype", frozen.DTYPES)
@pytest.mark.parametrize(
    "kind",
    [kind if kind == frozen.OWN else pytest.param(kind, marks=pytest.mark.slow) for kind in frozen.kinds()],
)
def test_runs_are_as_they_were(kind: str, dtype: str, embedded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_backends", {})
    if not frozen.use(kind):
        pytest.skip("no C compiler here")
    assert Path(embedded).is_dir()
    assert dict(frozen.runs(dtype)) == KEPT[frozen.arithmetic(kind, dtype)]
