"""Pages from templates. What is put into a page is escaped, and holds no control characters."""

from __future__ import annotations

import re
from typing import Any

_BAD = {code: 0xFFFD for code in (*range(9), 11, 12, *range(14, 32), 127)}


def render(template: str, **values: Any) -> str:
    """A template of ``report/templates`` with these values; those of ``.html`` are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("tokenswift.runs.report"),
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        finalize=lambda value: value.translate(_BAD) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["plain"] = plain
    return environment.get_template(template).render(values).strip() + "\n"


def plain(text: str) -> str:
    """Text as Markdown, on one line, without markup of its own."""
    return re.sub(r"([\\`*_{}\[\]<>#|~!])", r"\\\1", " ".join(text.split()))
