"""The commands and programs that README and docs show do run, and their links lead somewhere."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import tokenswift
from benchmarks.__main__ import build_parser as benchmarks_parser
from tokenswift.cli.declare import RARE, level_of
from tokenswift.cli.main import COMMANDS, build_parser, main
from tokenswift.config import ANSWERS, CONTINUED

ROOT = Path(__file__).parents[1]
MOST = 12  # tokens to write


def script(name: str) -> Any:
    """A module of scripts/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


walk = script("walk")
BLOCKS = [block for page in walk.pages() for block in walk.blocks(page)]
FAST = [b for b in BLOCKS if not b.mark and (b.kind == "python" or b.plain)]
SLOW = [b for b in BLOCKS if b.mark != "not run" and b not in FAST]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("page", sorted({b.page for b in FAST}))
def test_a_page(
    page: str,
    folder: Path,
    tiny_folder: Callable[..., Path],
    embedded: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every quick block of a page, in order, in this process; ``my-llama`` is tiny."""
    walk.furnish(folder, tiny_folder())
    names: dict[str, Any] = {}
    for block in (b for b in FAST if b.page == page):
        if block.kind == "python":
            program = compile(walk.shorten(block.text, MOST), block.name, "exec")
            exec(program, names)
            continue
        for command in block.commands:
            code = main(shlex.split(walk.shorten(command, MOST))[1:])
            shown = capsys.readouterr()
            assert code == 0, f"{block.name}: {command}\n{shown.err}"


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("page", sorted({b.page for b in SLOW}))
def test_slow_blocks(page: str, folder: Path, embedded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page with slow blocks, whole, by a shell; ``my-llama`` is the default model."""
    walk.furnish(folder, Path(embedded))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    before: list[str] = []
    for block in (b for b in BLOCKS if b.page == page and b.mark != "not run"):
        done = walk.run(block, folder, before, MOST)
        assert done.returncode == 0, f"{block.name}:\n{block.text}\n{done.stdout}"
        if block.kind == "python":
            before.append(block.text)


def test_blocks_are_found() -> None:
    """Nothing slips through: a fence is a block that could be run, or shows a text or a file."""
    shown = {"text", "toml", "yaml"}
    for page in walk.pages():
        kinds = re.findall(r"^```(\w*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        opened = [kind for kind in kinds[::2]]
        assert set(opened) <= {"sh", "python"} | shown, f"{page}: {opened}"
        assert len(walk.blocks(page)) == len([kind for kind in opened if kind not in shown]), page
    assert {b.page for b in FAST} >= {"README.md", "docs/commands.md", "docs/your-model.md"}
    assert all(b.reason for b in BLOCKS if b.mark)


def test_commands_that_are_not_run_exist() -> None:
    known = {name.replace("_", "-") for name in COMMANDS}
    for block in BLOCKS:
        if block.kind == "sh":
            for name in re.findall(r"\btokenswift ([a-z][\w-]*)", "\n".join(block.commands)):
                assert name in known, f"{block.name}: tokenswift {name}"


def test_the_readme_names_files_that_a_checkout_has() -> None:
    """A newcomer types its commands as they stand, in the checkout."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"--prompt-file (\S+)", text)
    assert named and [name for name in named if not (ROOT / name).is_file()] == []


def test_the_readme_says_what_pip_and_the_defaults_do() -> None:
    """The name on the package index is another project's; our defaults are not transformers'."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "unrelated package" in text and project["name"] in text
    defaults = CONTINUED
    for shown in (f"min-p {defaults.min_p}", f"DRY {defaults.dry_multiplier}"):
        assert shown in " ".join(text.split()), shown
    rows = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for name, words in (("temperature", ""), ("min_p", ""), ("dry_multiplier", " (off)")):
        answers, continued = getattr(ANSWERS, name), getattr(defaults, name)
        row = f"| `--{name.replace('_', '-')}` | {answers:g}{words} | {continued:g} |"
        assert row in rows, row


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The options that a parser and its subcommands show, some by --help-all alone."""
    found: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update(name for choice in action.choices.values() for name in options_of(choice))
        elif action.help != argparse.SUPPRESS or level_of(action) == RARE:
            found.update(action.option_strings)
    return found


def test_options_that_are_named_exist() -> None:
    known = options_of(build_parser()[0]) | options_of(benchmarks_parser()[0])
    others = {"--index-url", "--no-deps", "--torch-backend", "--nproc-per-node", "--speculative-config"}
    others |= {"--prompts", "--contexts", "--results", "--build", "--target"}
    others |= {"--tasks", "--batch_size", "--model_args"}  # lm-eval's
    others |= {"--passages", "--written"}  # of scripts/drafter_rates.py
    for page in walk.pages():
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", (ROOT / page).read_text(encoding="utf-8")))
        assert named <= known | others, f"{page}: {sorted(named - known - others)}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*walk.pages(), "docs/LOG.md", "CHANGELOG.md"])
def test_links(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for link in found:
        if re.match(r"https?:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_the_recording_is_drawn_from_what_was_recorded(tmp_path: Path) -> None:
    recording = script("recording")
    recording.render(ROOT / "docs" / "demo.cast", tmp_path / "demo.svg")
    assert (tmp_path / "demo.svg").read_text("utf-8") == (ROOT / "docs" / "demo.svg").read_text("utf-8")
    assert recording.pictures(ROOT / "docs" / "demo.cast")[-1][1].count("identical: yes") == 1


def test_the_picture_at_rest_is_the_last_screen() -> None:
    """What a viewer without animation shows, and one that takes the first picture of it."""
    recording = script("recording")
    svg = ElementTree.parse(ROOT / "docs" / "demo.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    window = svg.find(f"{name}svg")
    assert window is not None
    lines = window.find(f"{name}g[@id='lines']")
    assert lines is not None
    moved = re.fullmatch(r"translate\(0 (-?\d+)\)", lines.get("transform", ""))
    assert moved is not None, "the place of the last screen is not in an attribute"
    seen: list[tuple[int, str]] = []
    for text in lines.iter(f"{name}text"):
        down = int(text.get("y", "0")) + int(moved[1])
        if text.get("visibility") != "hidden" and 0 <= down <= int(window.get("height", "0")):
            seen.append((down, text.text or ""))
    last = recording.pictures(ROOT / "docs" / "demo.cast")[-1][1]
    expected = [line.strip() for line in last[-recording.ROWS :] if line.strip()]
    assert [line for _, line in sorted(seen)] == expected
    assert "identical: yes" in expected

    text = (ROOT / "docs" / "demo.svg").read_text("utf-8")
    starts = re.findall(r"animation:\w+ [\d.]+s(?: ([\d.]+)s)? step-end", text)
    assert starts and all(float(start or 0) >= recording.POSTER for start in starts)


def test_the_reference_names_everything_public() -> None:
    """What pages import too: from the package itself, or from a module that the reference names."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: tokenswift\.(\w+)$", text, re.MULTILINE))
    assert named == set(tokenswift.__all__) - {"__version__"}
    imported = [
        name for block in BLOCKS for name in re.findall(r"from (tokenswift[\w.]*) import", block.text)
    ]
    assert "tokenswift" in imported
    assert [name for name in imported if name != "tokenswift" and f"`{name}`" not in text] == []
