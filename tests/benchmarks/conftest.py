"""A way to call ``python -m benchmarks`` in this process."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.__main__ import build_parser
from tests.cli.conftest import Call, cli  # noqa: F401
from tokenswift.cli.main import main


@pytest.fixture
def bench(cli: Call, monkeypatch: pytest.MonkeyPatch) -> Call:  # noqa: F811
    """``bench("run", "table5")`` runs in an empty working folder."""
    monkeypatch.setattr("tests.cli.conftest.main", partial(main, build=build_parser))
    return cli
