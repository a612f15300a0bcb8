"""The report: all tables and figures that a folder has rows for, as Markdown and as one HTML page."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from tokenswift.benchmark import columns, tables
from tokenswift.benchmark.specs import Spec
from tokenswift.benchmark.tables import Group, Row, Table
from tokenswift.types import InputError

NOTES = "notes.toml"
SHOWN = 2400  # characters of a text with its repeats marked

Plot = Callable[[Spec, Group], dict[str, bytes]]


@dataclass(frozen=True, slots=True)
class Part:
    """A spec in the report.

    Attributes:
        spec: the table or figure.
        groups: its rows, with the names of their pictures (without ending; "" for none).
        note: what somebody wrote about them.
    """

    spec: Spec
    groups: list[tuple[Group, str]]
    note: str


@dataclass(frozen=True, slots=True)
class Report:
    """What is to be written.

    Attributes:
        parts: the specs that have rows, and those that have none (they are named at the end).
        pictures: file name → content.
        summary: what somebody wrote about all of it.
    """

    parts: list[Part]
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
        raise InputError(f"{file} is no TOML ({error})") from error
    if not all(isinstance(text, str) for text in found.values()):
        raise InputError(f"{file}: valid: texts by name of a spec, and summary")
    return {name: " ".join(text.split()) for name, text in found.items()}


def make(specs: Sequence[Spec], rows: Sequence[Row], said: dict[str, str], plot: Plot | None) -> Report:
    """Tables, pictures and notes.

    Args:
        said: from :func:`notes`.
        plot: makes a picture; None: no pictures.
    """
    parts: list[Part] = []
    pictures: dict[str, bytes] = {}
    for spec in specs:
        groups = []
        for number, group in enumerate(columns.groups(spec, rows), 1):
            made = plot(spec, group) if plot is not None else {}
            name = "-".join(filter(None, [spec.name, group.preset, str(number) if number > 1 else ""]))
            name = name if made else ""
            pictures |= {f"{name}.{kind}": content for kind, content in made.items()}
            groups.append((group, name))
        parts.append(Part(spec, groups, said.get(spec.name, "")))
    return Report(parts, pictures, said.get("summary", ""))


INTRO = (
    "Every figure comes from rows of JSON that hold the whole configuration, versions, machine, commit, "
    "seeds and raw times. Plain decoding is measured with every row, in the same process, in turns with it, "
    "from the same prefilled state; × is its time over the variant's. α and β are accepted drafted tokens "
    "over γ × steps, all and those of n-grams. ± is a standard deviation over prompts and seeds. The column "
    "“published” holds the paper's figures nearest to a line; what differs from the line stands in brackets."
)


# ---- Markdown ---------------------------------------------------------------------------------------


def markdown(report: Report, title: str, pictures: str | None, command: str = "") -> str:
    """The report as Markdown.

    Args:
        pictures: folder of the pictures, as links name it; None: no pictures.
        command: what makes this file, for a comment at its top.
    """
    out = [f"<!-- made by `{command}`; do not edit -->\n"] if command else []
    out += [f"# {title}\n", INTRO + "\n", *([report.summary + "\n"] if report.summary else [])]
    empty = [part.spec.label for part in report.parts if not part.groups]
    for part in report.parts:
        if part.groups:
            out += _markdown_part(part, pictures)
    if empty:
        out.append(f"No rows yet: {', '.join(empty)}.\n")
    return "\n".join(out)


def _markdown_part(part: Part, pictures: str | None) -> list[str]:
    spec = part.spec
    out = [f"## {spec.label}. {spec.title}\n"]
    if spec.of_paper:
        out.append(f"The paper: {spec.data.get('claim', '')}.\n")
    for group, name in part.groups:
        if spec.of_paper:
            out.append(f"Ours: {group.about}.\n")
        out.append(_table(spec, group).markdown())
        if name and pictures is not None:
            out.append(f"![{spec.label}: {spec.title}]({pictures}/{name}.svg)\n")
        if spec.kind == "text":
            out += [f"{head}\n\n> {_markdown_text(stretches)}\n" for head, stretches in texts(group)]
    if note := spec.data.get("published", {}).get("note"):
        out.append(f"Published: {note}.\n")
    if spec.of_paper:
        out.append(f"What differs and why: {_differs(part)}.\n")
    if part.note:
        out.append(f"What it says: {part.note}\n")
    return out


def _table(spec: Spec, group: Group) -> Table:
    if not spec.of_paper:
        return columns.table(spec, group.rows)
    if spec.kind == "draft":
        return Table(["", "ours", "published"], draft_cells(spec, group))
    found = tables.head(spec)
    if "published" in found:
        found[found.index("published")] = f"published: {tables.theirs_head(spec)}"
    cells = [tables.cells(spec, line) for line in group.lines]
    return Table(found, [*cells, *tables.published_cells(spec)])


def _differs(part: Part) -> str:
    """What differs from the paper, and why."""
    words = [part.spec.data["differs"]] if "differs" in part.spec.data else []
    rows = [row for group, _ in part.groups for row in group.rows]
    decoded = part.spec.kind in ("decode", "text")
    if decoded and any(row["device"] == "cpu" for row in rows):
        words.append(
            "on a processor every row of a pass costs arithmetic, so a tree is not free as on an A100, and "
            "the model and its keys and values are small"
        )
    if decoded and any(row["preset"] == "smoke" for row in rows):
        words.append(
            "rows of the preset smoke show that everything runs; their texts are too short to say more"
        )
    return "; ".join(words) or "nothing"


def _markdown_text(stretches: list[tuple[str, bool]]) -> str:
    made = []
    for text, repeated in stretches:
        plain = re.sub(r"([\\`*_{}\[\]<>#|~!])", r"\\\1", " ".join(text.split()))
        made.append(f"**{plain}**" if repeated and plain else plain)
    return " ".join(made)


# ---- shared -----------------------------------------------------------------------------------------


def draft_cells(spec: Spec, group: Group) -> list[list[str]]:
    """The lines of Table 11: what, ours, theirs."""
    ours: dict[str, Any] = group.rows[-1]["draft"]
    theirs = dict(spec.data.get("published", {}).get("rows", ()))
    return [
        [what, tables.shown(value), tables.shown(theirs[what]) if what in theirs else "–"]
        for what, value in ours.items()
    ]


def texts(group: Group) -> list[tuple[str, list[tuple[str, bool]]]]:
    """The beginnings of the group's texts: what each is, and its stretches with whether they are repeats."""
    made = []
    for row in group.rows:
        penalty = row["config"]["sampling"]["repetition_penalty"]
        all_of_it = row["stretches"]
        share = sum(len(text) for text, repeated in all_of_it if repeated) / max(
            1, sum(len(text) for text, _ in all_of_it)
        )
        word = f"penalty θ = {penalty:g}" if penalty != 1 else "without penalty"
        cut, room = [], SHOWN
        for text, repeated in all_of_it:
            if room > 0:
                cut.append((text[:room], bool(repeated)))
                room -= len(text)
        end = " The beginning:" if room < 0 else ""
        made.append((f"Text {row['config']['text'] + 1}, {word}: {share:.0%} of it repeats.{end}", cut))
    return made


# ---- HTML -------------------------------------------------------------------------------------------


def html(report: Report, title: str) -> str:
    """The report as one page: no scripts, no requests; pictures stand in it."""
    style = (resources.files("tokenswift") / "benchmark" / "page.css").read_text(encoding="utf-8")
    shown = [part for part in report.parts if part.groups]
    links = "".join(f'<li><a href="#{part.spec.name}">{escape(part.spec.label)}</a></li>' for part in shown)
    empty = [part.spec.label for part in report.parts if not part.groups]
    body = "".join(_html_part(part, report.pictures) for part in shown)
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>{escape(INTRO)}</p>"
        + (f"<p>{escape(report.summary)}</p>" if report.summary else "")
        + f'</header><nav aria-label="Tables and figures"><ul>{links}</ul></nav><main>{body}'
        + (f"<p>No rows yet: {escape(', '.join(empty))}.</p>" if empty else "")
        + "</main></body></html>\n"
    )


def _html_part(part: Part, pictures: dict[str, bytes]) -> str:
    spec = part.spec
    out = [f'<section aria-labelledby="{spec.name}"><h2 id="{spec.name}">{escape(spec.label)}. ']
    out.append(f"{escape(spec.title)}</h2>")
    if spec.of_paper:
        out.append(f"<p><b>The paper:</b> {escape(spec.data.get('claim', ''))}.</p>")
    for group, name in part.groups:
        if spec.of_paper:
            out.append(f'<p class="about">Ours: {escape(group.about)}.</p>')
        out.append(_table(spec, group).html())
        if name:
            picture = _inline(pictures[f"{name}.svg"].decode(), f"{spec.label}: {spec.title}", name)
            out.append(f"<figure>{picture}</figure>")
        if spec.kind == "text":
            out += [
                f"<h3>{escape(head)}</h3><p class=text>{_html_text(cut)}</p>" for head, cut in texts(group)
            ]
    if note := spec.data.get("published", {}).get("note"):
        out.append(f'<p class="about">Published: {escape(note)}.</p>')
    if spec.of_paper:
        out.append(f"<p><b>What differs and why:</b> {escape(_differs(part))}.</p>")
    if part.note:
        out.append(f"<p><b>What it says:</b> {escape(part.note)}</p>")
    return "".join([*out, "</section>"])


def _html_text(stretches: list[tuple[str, bool]]) -> str:
    return "".join(f"<mark>{escape(t)}</mark>" if repeated else escape(t) for t, repeated in stretches)


def _inline(svg: str, title: str, name: str) -> str:
    """A picture's own element; its ids made the page's own, so that pictures do not share them."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r'\bid="', f'id="{name}-', element)
    element = re.sub(r'href="#', f'href="#{name}-', element)
    element = re.sub(r"url\(#", f"url(#{name}-", element)
    return element.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def write(report: Report, out: Path, title: str) -> list[Path]:
    """Write page, Markdown and pictures into a folder; the files."""
    out.mkdir(parents=True, exist_ok=True)
    folder = out / "plots"
    made = [out / "report.md", out / "report.html"]
    made[0].write_text(markdown(report, title, "plots"), encoding="utf-8")
    made[1].write_text(html(report, title), encoding="utf-8")
    for name, content in report.pictures.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        made.append(folder / name)
    return made
