"""Options from dataclasses: their names, kinds, texts and defaults, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenswift.cli.declare import Parser, add_options, option


@dataclass(frozen=True)
class Base:
    """Options of two commands.

    Attributes:
        quiet: say nothing
    """

    quiet: bool = option(False)


@dataclass(frozen=True, kw_only=True)
class Some(Base):
    """Options of one.

    Attributes:
        top_k: keep 50% of ``k`` tokens,
            not more: none
        share, rate: of the whole.
        out: where it goes; default: nowhere
        place: a name
        word: several
    """

    top_k: int = option(3, least=1, earlier="--k")
    share: float | None = option(None)
    rate: float = option(0.5, "R", names=("-r",))
    out: Path | None = option(None)
    place: str = option(metavar="NAME", place=True)
    word: list[str] = option((), action="append")


def parser(**more: object) -> Parser:
    made = Parser(prog="p")
    add_options(made, Some, **more)  # type: ignore[arg-type]
    return made


def test_a_field_is_an_option() -> None:
    argv = "here --top-k 4 -r 2 --out a --word x --word y --quiet".split()
    assert vars(parser().parse_args(argv)) == {
        "top_k": 4, "rate": 2.0, "out": Path("a"), "word": ["x", "y"], "quiet": True, "place": "here",
        "share": None,
    }  # fmt: skip
    plain = parser().parse_args(["here"])
    assert (plain.top_k, plain.rate, plain.word, plain.quiet) == (3, 0.5, [], False)
    assert parser().parse_args(["here", "--k", "9"]).top_k == 9
    assert parser(unset=True).parse_args(["here"]).top_k is None
    assert parser(top_k=8).parse_args(["here"]).top_k == 8
    assert not hasattr(parser(only=("place", "rate")).parse_args(["here"]), "top_k")
