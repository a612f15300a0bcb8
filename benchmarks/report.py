"""The report: all tables and figures that a folder has rows for, as Markdown with pictures."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import tables
from benchmarks.specs import Spec
from benchmarks.tables import Group
from benchmarks.words import Row
from tokenswift.types import InputError

NOTES = "notes.toml"
SHOWN = 2400  # characters of a text with its repeats marked
INTRO = (
    "Every figure comes from rows of JSON that hold the whole configuration, versions, machine, "
    "commit, seeds and raw times. Plain decoding is measured with every row, in the same process, "
    "in turns with it, from the same prefilled state; × is its time over the variant's. α and β "
    "are accepted drafted tokens over γ × steps, all and those of n-grams. Figures are medians "
    "over prompts and seeds, with the least and the most in brackets. The paper's own figures "
    "stand below each of its tables."
)
Plot = Callable[[Spec, Group], bytes]


@dataclass(frozen=True, slots=True)
class Part:
    """A table or figure that has rows.

    Attributes:
        spec: what it shows.
        groups: its rows, by the conditions that they were measured under.
        pictures: the file name of each group's picture, and its content (b"" for none).
        note: what somebody wrote about it.
    """

    spec: Spec
    groups: list[Group]
    pictures: list[tuple[str, bytes]]
    note: str

    @property
    def rows(self) -> list[Row]:
        """All of its rows."""
        return [row for group in self.groups for row in group.rows]


def notes(folder: Path) -> dict[str, str]:
    """What ``notes.toml`` of a results folder says: ``summary``, and a text for each spec.

    Raises:
        InputError: the file is no TOML.
    """
    file = folder / NOTES
    if not file.is_file():
        return {}
    try:
        texts = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML ({error})") from error
    return {name: str(text).strip() for name, text in texts.items()}


def no_picture(spec: Spec, group: Group) -> bytes:
    """In place of :func:`benchmarks.plots.plot`."""
    return b""


def parts(
    specs: Sequence[Spec], rows: Sequence[Row], notes: Mapping[str, str], plot: Plot
) -> list[Part]:
    """The specs that have rows.

    Args:
        notes: see :func:`notes`.
        plot: draws a group.
    """
    shown = []
    for spec in specs:
        groups = tables.groups(spec, rows)
        if groups:
            pictures = [
                (picture_name(spec, group, number), plot(spec, group))
                for number, group in enumerate(groups, 1)
            ]
            shown.append(Part(spec, groups, pictures, notes.get(spec.name, "")))
    return shown


def picture_name(spec: Spec, group: Group, number: int) -> str:
    """The file name of a group's picture, such as "table3-cpu-2.svg" of the second group."""
    preset = group.rows[0]["preset"] if spec.of_paper else ""
    words = (spec.name, preset, str(number) if number > 1 else "")
    return "-".join(filter(None, words)) + ".svg"


def markdown(parts: Sequence[Part], title: str, summary: str) -> str:
    """The report."""
    blocks = [f"# {title}", INTRO, summary]
    for part in parts:
        blocks += blocks_of(part)
    return "\n\n".join(block.strip() for block in blocks if block.strip()) + "\n"


def blocks_of(part: Part) -> list[str]:
    """A part's paragraphs, tables and pictures; "" where there is nothing to say."""
    spec = part.spec
    theirs = tables.published(spec)
    blocks = [
        f"## {spec.label}. {spec.title}",
        f"The paper: {spec.data['claim']}." if spec.of_paper else "",
    ]
    for group, (name, picture) in zip(part.groups, part.pictures, strict=True):
        blocks += [
            f"Ours: {group.about}." if group.about else "",
            tables.of_group(spec, group).markdown(),
            f"![{spec.label}: {spec.title}](plots/{name})" if picture else "",
            *(_text(row) for row in group.rows if "stretches" in row),
        ]
    return [
        *blocks,
        theirs.markdown() if theirs else "",
        f"What differs: {spec.data['differs']}." if spec.of_paper else "",
        f"What it says: {part.note}" if part.note else "",
    ]


def _text(row: Row) -> str:
    """The beginning of a row's text, with repeats in bold."""
    penalty = row["config"]["sampling"]["repetition_penalty"]
    stretches = row["stretches"]
    characters = sum(len(text) for text, _ in stretches)
    repeated_characters = sum(len(text) for text, repeated in stretches if repeated)
    share = repeated_characters / max(1, characters)
    beginning = []
    room = SHOWN
    for text, repeated in stretches:
        plain = re.sub(r"([\\`*_{}\[\]<>#|~!])", r"\\\1", " ".join(text[: max(0, room)].split()))
        beginning.append(f"**{plain}**" if repeated and plain else plain)
        room -= len(text)
    head = (
        f"{row['config']['variant']}, text {row['config']['text'] + 1}, θ = {penalty:g}: "
        f"{share:.0%} repeats."
    )
    return f"{head} The beginning:\n\n> {' '.join(filter(None, beginning))}"


def write(parts: Sequence[Part], out: Path, title: str, summary: str) -> Path:
    """Write the report and its pictures into a folder; the file."""
    (out / "plots").mkdir(parents=True, exist_ok=True)
    for part in parts:
        for name, picture in part.pictures:
            if picture:
                (out / "plots" / name).write_bytes(picture)
    file = out / "report.md"
    file.write_text(markdown(parts, title, summary), encoding="utf-8")
    return file
