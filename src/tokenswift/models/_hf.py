"""Small helpers around transformers that keep its chatter off the user's terminal."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from logging import CRITICAL, getLogger
from typing import Any

from tokenswift.types import OnProgress


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars, log lines and Python warnings inside the block.

    Loading errors still surface: they are exceptions. The previous settings come back at the end.
    """
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    placing = getLogger("accelerate.big_modeling")
    level = placing.level
    placing.setLevel(CRITICAL)
    logging.disable_progress_bar()
    logging.set_verbosity(CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        placing.setLevel(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def counted_loading(on_progress: OnProgress | None) -> Iterator[None]:
    """Inside the block, transformers' loading of weights is told to ``on_progress`` as stage "load"."""
    from transformers.utils import logging

    if on_progress is None:
        yield
        return
    report = on_progress

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts = args and isinstance(args[0], Sized) and kwargs.get("desc") == "Loading weights"
        return _told(args[0], report) if counts else factory(*args, **kwargs)

    before = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _told(items: Any, on_progress: OnProgress) -> Iterator[Any]:
    on_progress("load", 0, len(items))
    for done, item in enumerate(items, 1):
        yield item
        on_progress("load", done, len(items))
