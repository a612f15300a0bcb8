"""The page at ``/``: one document of its parts in ``web/``, under a policy that lets nothing else
run.

The parts are written into the page, so that it needs no other path, works behind a proxy that moves
it, and is complete or not there. Libraries are in ``web/vendor``, with their licences.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files

SCRIPTS = ("vendor/marked.umd.js", "vendor/purify.min.js", "markdown.js", "page.js")


def page_of(strategies: Sequence[str] = ()) -> str:
    """The page.

    Args:
        strategies: that clients may choose besides those that the page has.
    """
    style = part("page.css")
    scripts = [part(name) for name in SCRIPTS]
    parts = {
        "policy": policy_of(style, scripts),
        "style": style,
        "strategies": "".join(f"<option>{name}" for name in strategies),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return re.sub(r"\{(\w+)\}", lambda match: parts[match[1]], part("page.html"))


def part(name: str) -> str:
    """A file of the page."""
    return (files("tokenswift.serve") / "web" / name).read_text(encoding="utf-8")


def policy_of(style: str, scripts: Sequence[str]) -> str:
    """What a browser lets the page do: run these scripts, ask this server, and nothing else. Text
    becomes markup in the sanitiser alone, where the browser can see to that."""
    allowed_scripts = " ".join(source_of(script) for script in scripts)
    rules = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "script-src": allowed_scripts,
        "style-src": source_of(style),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def source_of(text: str) -> str:
    """A text of a style or a script, as a policy names it."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
