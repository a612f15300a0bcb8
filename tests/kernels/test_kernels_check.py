"""The kernels' check of themselves: green for what is compiled; it finds libraries that round by the row."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.tiny import tiny_model
from tokenswift.kernels.cpu import backend, library
from tokenswift.kernels.cpu.backend import fault_of
from tokenswift.kernels.torch import TorchBackend
from tokenswift.models import target as targets

#: a place in the sources, and what would make rows differ there
DEFECTS = {
    "two roundings outside the tiles": (
        "x = fused(splat(e[j]), part ? load_part(type, row, part) : load(type, row), x);",
        "x += e[j] * (part ? load_part(type, row, part) : load(type, row));",
    ),
    "a product that depends on the number of rows": (
        "acc[r][c] = fused(splat(x), w[c], acc[r][c]);",
        "acc[r][c] = rows > 1 ? splat(x) * w[c] + acc[r][c] : fused(splat(x), w[c], acc[r][c]);",
    ),
    "scratch memory that threads share": ("all->work + thread * all->each", "all->work"),
    "a wrong sibling that is seen": (
        "if (j < CHUNK) slots[j - begin] = (int32_t)(a->before + node);",
        "if (j < CHUNK) slots[j - begin] = (int32_t)(a->before + (node > 1 ? node - 1 : node));",
    ),
}


def _made(folder: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> object:
    monkeypatch.setattr(library, "FLAGS", ("-O1", *library.FLAGS[1:]))  # half of the time to compile
    sources = library._sources()
    changed = [text.replace(old, new) for text in sources]
    assert changed != sources
    monkeypatch.setattr(library, "_sources", lambda: changed)
    compiled = library.compiled(folder)
    if isinstance(compiled, str):
        pytest.skip("no C compiler here")
    return compiled


@pytest.mark.slow  # each compiles all kernels
@pytest.mark.parametrize("defect", DEFECTS)
def test_kernels_that_round_by_the_row_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    compiled = _made(tmp_path, monkeypatch, *DEFECTS[defect])
    found = [fault_of(compiled) for _ in range(20 if "threads" in defect else 1)]  # type: ignore[arg-type]
    assert any(found)


@pytest.mark.slow
def test_such_kernels_are_not_used_and_nothing_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = _made(tmp_path, monkeypatch, *DEFECTS["two roundings outside the tiles"])
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.setattr(backend, "library", lambda folder: compiled)
    with caplog.at_level(logging.WARNING):
        target = targets.make_target(tiny_model("llama"))
    assert isinstance(target.backend, TorchBackend)
    assert [record.message[:52] for record in caplog.records] == [
        "the compiled CPU kernels give rows other bits than t"
    ]
    assert target.numerics()["equal_bits"] is False
