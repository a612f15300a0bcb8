"""The report: all tables and figures that a folder has rows for, as Markdown and as one HTML page."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import columns, tables
from benchmarks.specs import Spec
from benchmarks.tables import Group, Row, Table
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


#: control characters, but for tabs and line ends
_BAD = {code: 0xFFFD for code in (*range(9), 11, 12, *range(14, 32), 127)}


def render(template: str, **values: Any) -> str:
    """A template of ``templates`` with these values; those of ``.html`` are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("benchmarks"),
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        finalize=lambda value: value.translate(_BAD) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = _plain
    return environment.get_template(template).render(values).strip() + "\n"


def _plain(text: str) -> str:
    """Text as Markdown, on one line, without markup of its own."""
    return re.sub(r"([\\`*_{}\[\]<>#|~!])", r"\\\1", " ".join(text.split()))


def markdown(report: Report, title: str, pictures: str | None, command: str = "") -> str:
    """The report as Markdown.

    Args:
        pictures: folder of the pictures, as links name it; None: no pictures.
        command: what makes this file, for a comment at its top.
    """
    return render("bench.md", **_view(report, title), pictures=pictures, command=command)


def html(report: Report, title: str) -> str:
    """The report as one page: no scripts, no requests; pictures stand in it."""
    view = _view(report, title)
    for part in view["parts"]:
        for group in part["groups"]:
            svg = report.pictures.get(f"{group['name']}.svg")
            group["picture"] = svg and _inline(
                svg.decode(), f"{part['label']}: {part['title']}", group["name"]
            )
    return render("bench.html", **view)


def _view(report: Report, title: str) -> dict[str, Any]:
    """What both forms of a report show."""
    return {
        "title": title,
        "intro": INTRO,
        "summary": report.summary,
        "parts": [_part(part) for part in report.parts if part.groups],
        "empty": ", ".join(part.spec.label for part in report.parts if not part.groups),
    }


def _part(part: Part) -> dict[str, Any]:
    spec = part.spec
    return {
        **{name: getattr(spec, name) for name in ("name", "label", "title", "of_paper")},
        "claim": spec.data.get("claim", ""),
        "published": spec.data.get("published", {}).get("note"),
        "differs": _differs(part),
        "note": part.note,
        "groups": [
            {
                "about": group.about,
                "name": name,
                "table": _table(spec, group),
                "texts": texts(group) if spec.kind == "text" else [],
            }
            for group, name in part.groups
        ],
    }


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


def _inline(svg: str, title: str, name: str) -> Any:
    """A picture's own element; its ids made the page's own, so that pictures do not share them."""
    from markupsafe import Markup, escape

    element = svg[svg.index("<svg") :]
    element = re.sub(r'\bid="', f'id="{name}-', element)
    element = re.sub(r'href="#', f'href="#{name}-', element)
    element = re.sub(r"url\(#", f"url(#{name}-", element)
    return Markup(element.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1))


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
