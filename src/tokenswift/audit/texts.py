"""Texts that come with the package, for audits."""

from __future__ import annotations

from importlib import resources


def shipped_prompts() -> list[str]:
    """A story, a list of instructions, and a piece of program."""
    data = resources.files("tokenswift").joinpath("data")
    texts = [
        data.joinpath(name).read_text("utf-8") for name in ("demo_prompt.txt", "audit_prompts.txt")
    ]
    return [part.strip() for text in texts for part in text.split("\n---\n")]


def shipped_texts() -> list[str]:
    """Four short texts, enough to judge a number type by."""
    folder = resources.files("tokenswift").joinpath("data", "prompts")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return [file.read_text("utf-8") for file in files if file.name.endswith(".txt")]
