"""The kernels' check of themselves: green for what is compiled; it finds libraries that round by
the row."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.tiny import tiny_model
from tokenswift.kernels.cpu import check, library
from tokenswift.models import target as targets

#: places in the sources, and what would make rows differ there
DEFECTS = {
    "x = fused(splat(e[j]), load_left(type, row, width - c), x);": (
        "x += e[j] * load_left(type, row, width - c);"
    ),
    "acc[r][c] = fused(splat(x), w[c], acc[r][c]);": (
        "acc[r][c] = rows > 1 ? splat(x) * w[c] + acc[r][c] : fused(splat(x), w[c], acc[r][c]);"
    ),
    "slots[j - begin] = (int32_t)(a->before + node);": (
        "slots[j - begin] = (int32_t)(a->before + (node > 1 ? node - 1 : node));"
    ),
}


@pytest.mark.slow  # each compiles all kernels
@pytest.mark.parametrize("defect", DEFECTS)
def test_kernels_that_round_by_the_row_are_not_used_and_nothing_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, defect: str
) -> None:
    """Two roundings outside the tiles, by the number of rows, and a wrong sibling that is seen."""
    monkeypatch.setattr(
        library, "FLAGS", ("-O1", *library.FLAGS[1:])
    )  # half of the time to compile
    sources = library._sources()
    changed = [text.replace(defect, DEFECTS[defect]) for text in sources]
    assert changed != sources
    monkeypatch.setattr(library, "_sources", lambda: changed)
    if isinstance(compiled := library.compiled(tmp_path), str):
        pytest.skip("no C compiler here")
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.setattr(check, "library", lambda folder, on_progress: compiled)
    with caplog.at_level(logging.WARNING):
        target = targets.make_target(tiny_model("llama"))
    assert target.backend.name == "torch"
    assert target.numerics()["equal_bits"] is False
    assert [record.message[:52] for record in caplog.records] == [
        "the compiled CPU kernels give rows other bits than t"
    ]
