"""The tokens and the steps of ninety runs are those that earlier versions wrote (see `frozen`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.default_model import default_llm
from tests.lossless import frozen
from tokenswift import LLM
from tokenswift.models import target as targets

KEPT = json.loads(frozen.FILE.read_text(encoding="utf-8"))


def test_each_type_has_thirty_runs() -> None:
    assert {name.split()[0] for name in KEPT} == set(frozen.DTYPES)
    assert all(len(runs) == 30 for runs in KEPT.values())


@pytest.mark.model
@pytest.mark.parametrize(
    ("dtype", "text", "sampler"), [("float32", "harbour", "paper"), ("int8", "letters", "nucleus")]
)
def test_runs_are_as_they_were(dtype: str, text: str, sampler: str, embedded: str) -> None:
    """A sixth of two types on this processor's own kernels; every strategy writes plain decoding's
    text."""
    assert Path(embedded).is_dir()
    texts = []
    fewer = 0
    for strategy, _, out in frozen.runs(default_llm(dtype), text, [sampler]):
        texts.append(out.token_ids)
        assert out.token_ids == texts[0], strategy
        frozen_digest = KEPT[frozen.arithmetic(frozen.OWN, dtype)][
            f"{strategy} {sampler} {dtype} {text}"
        ]
        assert frozen.digest(out) == frozen_digest, strategy
        fewer += out.metrics.steps < frozen.NEW
    assert fewer >= 2  # drafts are good for something


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("dtype", frozen.DTYPES)
@pytest.mark.parametrize("kind", frozen.kinds())
def test_all_runs_are_as_they_were(
    kind: str, dtype: str, embedded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_backends", {})
    if not frozen.use(kind):
        pytest.skip("no C compiler here")
    assert Path(embedded).is_dir()
    llm = LLM("smollm2-135m", dtype=dtype, device="cpu")
    assert frozen.hashes(llm, dtype) == KEPT[frozen.arithmetic(kind, dtype)]
