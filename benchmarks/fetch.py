"""Real models that benchmarks and slow tests run, by the names of their files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.needs import FETCHED
from tokenswift.loader.default_model import cache_dir
from tokenswift.loader.fetch import fetch_named


def fetched(name: str) -> Path:
    """The file of a model of :data:`~benchmarks.needs.FETCHED`, fetched where it is not here yet.

    Raises:
        InputError, RunError: as of `tokenswift.loader.fetch.fetch_named`.
    """
    return fetch_named(FETCHED[name], cache_dir())


def model_file(name: str) -> Path:
    """The file of a model that is fetched, or the file so named."""
    return fetched(name) if name in FETCHED else Path(name)


def model_name(name: str) -> str:
    """What rows call a model: its name where it is fetched, or its file's without the ending."""
    return name if name in FETCHED else Path(name).stem
