"""Which heads a name means: shipped ones by their kind, for the model's weights and those rounded
from them; and files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.speculation.heads.test_heads import names, random_heads, tiny
from tokenswift.loader.host import host_of
from tokenswift.loader.identity import base_of
from tokenswift.speculation.heads import find as module
from tokenswift.speculation.heads.files import save_heads
from tokenswift.speculation.heads.find import load_heads, resolve_heads
from tokenswift.types import InputError


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Heads of two kinds for a tiny model, in place of the library's own."""
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path / "cache"))
    files = []
    for kind in ("linear", "medusa"):
        files.append(tmp_path / f"a.{kind}.heads.safetensors")
        save_heads(random_heads(kind), files[-1], base_of(tiny(), "tiny"))
    monkeypatch.setattr(module, "shipped_files", lambda end: files)
    monkeypatch.setattr(module, "trained_files", lambda end: [])
    return files[0]


@pytest.mark.parametrize("spec", ["none", None, "auto"])
def test_no_heads_are_none(spec: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "trained_files", lambda end: [])
    assert resolve_heads(spec, host_of(tiny())) is None


@pytest.mark.parametrize(
    ("spec", "kind"), [("linear", "linear"), ("medusa", "medusa"), ("auto", "linear")]
)
def test_a_kind_names_the_shipped_heads_of_that_kind(shipped: Path, spec: str, kind: str) -> None:
    heads = resolve_heads(spec, host_of(tiny()))
    assert heads is not None
    assert heads.kind == kind
    assert heads.source == f"a.{kind}.heads.safetensors (shipped)"


@pytest.mark.parametrize(("kind", "seed"), [("conditioned", 0), ("linear", 5)])
def test_a_kind_that_is_not_shipped_for_the_model_is_refused(
    shipped: Path, kind: str, seed: int
) -> None:
    with pytest.raises(InputError, match=f"^heads is '{kind}'; valid: auto, none, a kind whose"):
        resolve_heads(kind, host_of(tiny(seed=seed)))


@pytest.mark.parametrize(("moved", "fits"), [(0.004, True), (0.08, True), (0.3, False)])
def test_shipped_heads_fit_weights_that_were_rounded(
    shipped: Path, moved: float, fits: bool
) -> None:
    """As far as quantization moves them; heads from a file keep to the weights themselves."""
    model = tiny()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += moved * weight.norm() / weight.numel() ** 0.5 * torch.randn_like(weight)
    assert (resolve_heads("auto", host_of(model)) is not None) == fits
    if moved > 0.01:
        with pytest.raises(InputError, match="their weights differ"):
            load_heads(shipped, host_of(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_is_known_in_another_type(shipped: Path, dtype: torch.dtype) -> None:
    heads = load_heads(shipped, host_of(tiny().to(dtype)))
    assert next(heads.parameters()).dtype == dtype


def test_heads_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="^cannot write heads to .*file/a.safetensors: "):
        save_heads(random_heads("linear"), tmp_path / "file" / "a.safetensors", base_of(tiny()))
    assert names(tmp_path) == ["file"]


def test_heads_beyond_the_models_type_are_refused(tmp_path: Path) -> None:
    heads = random_heads("medusa")
    with torch.no_grad():
        next(heads.parameters()).fill_(1e5)  # float16 ends at 65,504
    file = tmp_path / "large.heads.safetensors"
    save_heads(heads, file, base_of(tiny(), "tiny"))
    model = tiny()
    assert load_heads(file, host_of(model)) is not None
    with pytest.raises(InputError, match=r"large.heads.safetensors: .* is not finite in float16"):
        load_heads(file, host_of(model.half()))
