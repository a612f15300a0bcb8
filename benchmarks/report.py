"""The report: all tables and figures that a folder has rows for, as Markdown and as one HTML page."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.specs import Spec
from benchmarks.tables import Group
from benchmarks.words import Row
from tokenswift.types import InputError

NOTES = "notes.toml"
SHOWN = 2400  # characters of a text with its repeats marked
#: control characters, but for tabs and line ends
BAD = {code: 0xFFFD for code in (*range(9), 11, 12, *range(14, 32), 127)}
INTRO = (
    "Every figure comes from rows of JSON that hold the whole configuration, versions, machine, commit, "
    "seeds and raw times. Plain decoding is measured with every row, in the same process, in turns with it, "
    "from the same prefilled state; × is its time over the variant's. α and β are accepted drafted tokens "
    "over γ × steps, all and those of n-grams. ± is a standard deviation over prompts and seeds. The column "
    "“published” holds the paper's figures nearest to a line; what differs from the line stands in brackets."
)
Plot = Callable[[Spec, Group], dict[str, bytes]]


@dataclass(frozen=True, slots=True)
class Report:
    """What is to be written.

    Attributes:
        parts: what the templates show of each spec that has rows.
        empty: labels of the specs that have none.
        pictures: file name → content.
        summary: what somebody wrote about all of it.
    """

    parts: list[dict[str, Any]]
    empty: list[str]
    pictures: dict[str, bytes]
    summary: str


def notes(folder: Path) -> dict[str, str]:
    """What ``notes.toml`` of a results folder says: ``summary``, and a text for each spec.

    Raises:
        InputError: the file is no TOML, or holds something else than texts.
    """
    file = folder / NOTES
    if not file.is_file():
        return {}
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML ({error})") from error
    if not all(isinstance(text, str) for text in found.values()):
        raise InputError(f"{file}: valid: texts by name of a spec, and summary")
    return {name: " ".join(text.split()) for name, text in found.items()}


def make(specs: Sequence[Spec], rows: Sequence[Row], said: dict[str, str], plot: Plot | None) -> Report:
    """Tables, pictures and notes.

    Args:
        said: from :func:`notes`.
        plot: makes a picture; None: no pictures.
    """
    made = Report([], [], {}, said.get("summary", ""))
    for spec in specs:
        groups = []
        for index, group in enumerate(tables.groups(spec, rows), 1):
            pictures = plot(spec, group) if plot is not None else {}
            preset = group.rows[0]["preset"] if spec.of_paper else ""
            name = "-".join(filter(None, [spec.name, preset, str(index) if index > 1 else ""]))
            made.pictures.update({f"{name}.{kind}": content for kind, content in pictures.items()})
            groups.append(
                {
                    "about": group.about,
                    "name": name if pictures else "",
                    "table": tables.of_group(spec, group),
                    "texts": [_text(row) for row in group.rows] if spec.kind == "text" else [],
                    "rows": group.rows,
                }
            )
        if not groups:
            made.empty.append(spec.label)
            continue
        part = {name: getattr(spec, name) for name in ("name", "label", "title", "of_paper")}
        part |= {"claim": spec.data.get("claim", ""), "groups": groups, "note": said.get(spec.name, "")}
        part |= {"published": spec.data.get("published", {}).get("note"), "differs": _differs(spec, groups)}
        made.parts.append(part)
    return made


def _differs(spec: Spec, groups: Sequence[dict[str, Any]]) -> str:
    """What differs from the paper, and why."""
    words = [spec.data["differs"]] if "differs" in spec.data else []
    rows = [row for group in groups for row in group["rows"]] if spec.kind in ("decode", "text") else []
    if any(row["device"] == "cpu" for row in rows):
        words.append(
            "on a processor every row of a pass costs arithmetic, so a tree is not free as on an A100, and "
            "the model and its keys and values are small"
        )
    if any(row["preset"] == "smoke" for row in rows):
        words.append(
            "rows of the preset smoke show that everything runs; their texts are too short to say more"
        )
    return "; ".join(words) or "nothing"


def _text(row: Row) -> tuple[str, list[tuple[str, bool]]]:
    """The beginning of a row's text: what it is, and its stretches with whether they are repeats."""
    penalty, stretches = row["config"]["sampling"]["repetition_penalty"], row["stretches"]
    whole = sum(len(text) for text, _ in stretches)
    share = sum(len(text) for text, repeated in stretches if repeated) / max(1, whole)
    word = f"penalty θ = {penalty:g}" if penalty != 1 else "without penalty"
    cut, room = [], SHOWN
    for text, repeated in stretches:
        if room > 0:
            cut.append((text[:room], bool(repeated)))
            room -= len(text)
    end = " The beginning:" if room < 0 else ""
    return f"Text {row['config']['text'] + 1}, {word}: {share:.0%} of it repeats.{end}", cut


def render(template: str, report: Report, **values: Any) -> str:
    """A template of ``templates``; what is put into one of ``.html`` is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("benchmarks"),
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        finalize=lambda value: value.translate(BAD) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": _plain, "inline": _inline}
    said = {"intro": INTRO, "summary": report.summary, "parts": report.parts}
    said |= {"empty": ", ".join(report.empty), "pictures": report.pictures}
    return environment.get_template(template).render(said | values).strip() + "\n"


def _plain(text: str) -> str:
    """Text as Markdown, on one line, without markup of its own."""
    return re.sub(r"([\\`*_{}\[\]<>#|~!])", r"\\\1", " ".join(text.split()))


def _inline(svg: bytes, title: str, name: str) -> Any:
    """A picture's own element; its ids made the page's own, so that pictures do not share them."""
    from markupsafe import Markup, escape

    element = svg.decode().partition("<svg ")[2]
    element = re.sub(r'\bid="', f'id="{name}-', element)
    element = re.sub(r'href="#', f'href="#{name}-', element)
    element = re.sub(r"url\(#", f"url(#{name}-", element)
    return Markup(f'<svg role="img" aria-label="{escape(title)}" {element}')


def markdown(report: Report, title: str, folder: str | None, command: str = "") -> str:
    """The report as Markdown.

    Args:
        folder: of the pictures, as links name it; None: no pictures.
        command: what makes this file, for a comment at its top.
    """
    return render("bench.md", report, title=title, folder=folder, command=command)


def html(report: Report, title: str) -> str:
    """The report as one page: no scripts, no requests; pictures stand in it."""
    return render("bench.html", report, title=title)


def write(report: Report, out: Path, title: str) -> list[Path]:
    """Write page, Markdown and pictures into a folder; the files."""
    files = {
        "report.md": markdown(report, title, "plots").encode(),
        "report.html": html(report, title).encode(),
    }
    files |= {f"plots/{name}": content for name, content in report.pictures.items()}
    for name, content in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    return [out / name for name in files]
