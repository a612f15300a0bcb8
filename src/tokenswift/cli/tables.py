"""Tables in a terminal, drawn by rich: no wider than the terminal, and whole where there is none."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Sequence

from tokenswift.cli.escapes import visible
from tokenswift.cli.progress import is_live
from tokenswift.cli.wrap import LEAST, columns

WIDE = 10_000  # columns where nothing has to be folded


def table(
    rows: Iterable[Sequence[str]], head: Sequence[str] = (), right: Container[int] = (), indent: int = 0
) -> str:
    """Rows of cells as text; what commands a terminal is made visible.

    Args:
        rows: cells, as many in each.
        head: of the columns; () for none.
        right: columns whose cells stand at the right, such as numbers.
        indent: spaces before each line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    cells = [[visible(cell).replace("\n", " ") for cell in row] for row in rows]
    bold = "bold" if is_live(sys.stdout) else ""
    made = Table(box=SIMPLE_HEAD if head else None, show_edge=False, pad_edge=False, header_style=bold)
    made.show_header = bool(head)
    for place, name in enumerate(head or cells[0]):
        made.add_column(name if head else "", justify="right" if place in right else "left", overflow="fold")
    for row in cells:
        made.add_row(*row)
    console = Console(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else WIDE,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as shown:
        console.print(Padding(made, (0, 0, 0, indent), expand=False))
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def folded(text: str) -> list[str]:
    """A text as lines that a terminal does not cut; one line where there is none."""
    from textwrap import wrap

    return wrap(text, columns() - 1 if columns() > LEAST else WIDE)
