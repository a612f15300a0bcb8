"""A way to call ``python -m benchmarks`` in this process."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from tests.cli.conftest import Call, cli  # noqa: F401
from tests.forks import start_forkserver


@pytest.fixture(scope="session")
def rows() -> None:
    """The process that rows are forked from, started where it can import what they need: started in
    a test's folder it could not, and each row would import torch by itself."""
    start_forkserver()


@pytest.fixture
def bench(rows: None, cli: Call, monkeypatch: pytest.MonkeyPatch) -> Call:  # noqa: F811
    """``bench("run", "table5")`` runs in an empty working folder."""
    monkeypatch.setattr("tests.cli.conftest.main", main)
    return cli
