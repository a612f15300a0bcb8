"""Draw docs/floors.svg: the floors of the package, as .importlinter has them.

    python tools/floors.py

A floor is a layer of a contract: its modules may import those below it, and none above. Modules of
one floor that touch in the picture may import each other (":" in the file); those apart may not
("|").
"""

from __future__ import annotations

import configparser
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = ROOT / ".importlinter"
PICTURE = ROOT / "docs" / "floors.svg"

TITLE = "Floors of the package: imports go down only"
NOTES = (
    "Imports go down only, from a floor to any below it.",
    "Boxes that touch may import each other;",
    "boxes apart on one floor may not.",
)
BLOCK_WIDTH = 500  # pixels
MARGIN = 24
HEAD = 34  # from a block's top to its first floor
FLOOR = 30  # from floor to floor
BOX = 24  # height of a box
GAP = 10  # between boxes apart
NOTE = 20  # from note to note
STYLE = """
.paper{fill:#ffffff} .ink{fill:#1f2430} .faint{fill:#5b6472}
.box{fill:#e8eef9;stroke:#4a6491}
@media (prefers-color-scheme:dark){
.paper{fill:#151a22} .ink{fill:#e3e8f0} .faint{fill:#9aa5b5}
.box{fill:#243350;stroke:#7f9fd6}
}
"""


@dataclass(frozen=True, slots=True)
class Floor:
    """One layer of a contract.

    Attributes:
        modules: names, in the order of the file.
        touching: they may import each other.
    """

    modules: tuple[str, ...]
    touching: bool


@dataclass(frozen=True, slots=True)
class Block:
    """The floors of one contract.

    Attributes:
        package: what has the modules, such as "tokenswift.speculation".
        promise: the contract's name.
        floors: from the top down.
    """

    package: str
    promise: str
    floors: tuple[Floor, ...]


def floor_of(line: str) -> Floor:
    """A floor as .importlinter writes it: "a", "a | b" or "a : b"."""
    touching = ":" in line
    modules = line.split(":" if touching else "|")
    return Floor(tuple(module.strip() for module in modules), touching)


def blocks_of(contracts: str) -> list[Block]:
    """The contracts of layers in a file's text, in its order."""
    parser = configparser.ConfigParser()
    parser.read_string(contracts)
    return [
        Block(
            package=section["containers"].strip(),
            promise=section["name"],
            floors=tuple(map(floor_of, section["layers"].split("\n")[1:])),
        )
        for section in parser.values()
        if section.get("type") == "layers"
    ]


def floor_boxes(floor: Floor, left: float, top: float) -> Iterator[str]:
    """The boxes of a floor, side by side over a block's width, with their names."""
    gap = 0 if floor.touching else GAP
    count = len(floor.modules)
    width = (BLOCK_WIDTH - gap * (count - 1)) / count
    for number, module in enumerate(floor.modules):
        x = left + number * (width + gap)
        yield (
            f'<rect class="box" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BOX}" rx="4"/>'
        )
        yield text_element("ink", x + width / 2, top + 17, module, ' text-anchor="middle"')


def block_height(block: Block) -> int:
    """From a block's top to the foot of its lowest floor."""
    return HEAD + FLOOR * len(block.floors)


def block_elements(block: Block, left: float) -> Iterator[str]:
    """A block: its package and promise, above its floors."""
    yield text_element("ink", left, MARGIN + 8, block.package, ' font-weight="bold"')
    yield text_element("faint", left, MARGIN + 25, block.promise)
    for number, floor in enumerate(block.floors):
        yield from floor_boxes(floor, left, MARGIN + HEAD + FLOOR * number)


def text_element(kind: str, x: float, y: float, text: str, attributes: str = "") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y}"{attributes}>{escape(text)}</text>'


def draw(contracts: str) -> str:
    """The picture of a file of contracts, as SVG."""
    blocks = blocks_of(contracts)
    width = MARGIN + len(blocks) * (BLOCK_WIDTH + MARGIN)
    height = 2 * MARGIN + max(map(block_height, blocks))
    elements = [f'<rect class="paper" width="{width}" height="{height}" rx="8"/>']
    left = MARGIN
    for block in blocks:
        elements += block_elements(block, left)
        left += BLOCK_WIDTH + MARGIN
    last = left - BLOCK_WIDTH - MARGIN
    top = 2 * MARGIN + block_height(blocks[-1]) + 12
    elements += [
        text_element("faint", last, top + NOTE * number, note) for number, note in enumerate(NOTES)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="13" role="img">'
    )
    title = f"<title>{TITLE}</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *elements, "</svg>\n"])


def main() -> int:
    """Write the picture."""
    PICTURE.write_text(draw(CONTRACTS.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
