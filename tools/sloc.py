"""How much code there is, and how densely it is written.

    python tools/sloc.py [FOLDER]

Prints lines of code, lexical tokens, tokens a line and uses of ``Any``, of `src` and of `tests`.
Tokens a line and uses of ``Any`` have limits in pyproject.toml, which may only fall. Lines have
none: whether a feature is worth its size is for its reader to judge. With a folder: the lines of
code of each folder and file directly in it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass
class Size:
    """The size of some code.

    Attributes:
        python_lines: lines of Python that hold code.
        c_lines: lines of C that hold code.
        tokens: lexical tokens of Python.
        any_uses: how often the name ``Any`` is used, imports included.
    """

    python_lines: int = 0
    c_lines: int = 0
    tokens: int = 0
    any_uses: int = 0

    @property
    def tokens_per_line(self) -> float:
        """Tokens a line of Python, to two decimals."""
        return round(self.tokens / max(1, self.python_lines), 2)

    def __add__(self, other: Size) -> Size:
        return Size(
            python_lines=self.python_lines + other.python_lines,
            c_lines=self.c_lines + other.c_lines,
            tokens=self.tokens + other.tokens,
            any_uses=self.any_uses + other.any_uses,
        )


def docstring_places(text: str) -> set[tuple[int, int]]:
    """Line and column where each docstring of a Python file begins."""
    places: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            places.add((first.lineno, first.col_offset))
    return places


def python_size(text: str) -> Size:
    """The size of a Python file, without blank lines, comments and docstrings."""
    docstrings = docstring_places(text)
    lines: set[int] = set()
    size = Size()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in NO_CODE or token.start in docstrings:
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
        size.tokens += 1
        size.any_uses += token.type == tokenize.NAME and token.string == "Any"
    size.python_lines = len(lines)
    return size


def c_size(text: str) -> Size:
    """The size of a C file, without blank lines and comments."""
    bare = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    return Size(c_lines=sum(bool(re.sub(r"//.*", "", line).strip()) for line in bare.splitlines()))


def file_size(file: Path) -> Size:
    """The size of a Python or C file."""
    text = file.read_text(encoding="utf-8")
    return python_size(text) if file.suffix == ".py" else c_size(text)


def source_files(folder: Path) -> list[Path]:
    """All Python and C files below a folder."""
    return [file for file in sorted(folder.rglob("*")) if file.suffix in (".py", ".c", ".h")]


def folder_size(folder: Path) -> Size:
    """The size of all Python and C files below a folder."""
    return sum((file_size(file) for file in source_files(folder)), Size())


def print_parts(folder: Path) -> None:
    """Print the lines of code of each folder and file directly in a folder."""
    parts: Counter[str] = Counter()
    files = source_files(folder)
    for file in files:
        size = file_size(file)
        parts[file.relative_to(folder).parts[0]] += size.python_lines + size.c_lines
    for name, lines in sorted(parts.items()):
        print(f"{lines:6} {name}")
    print(f"{parts.total():6} in {len(files)} files")


def over_limits(name: str, size: Size, limits: dict[str, float]) -> list[str]:
    """A sentence for each limit of `name` that its size exceeds."""
    complaints = []
    most_dense = limits.get(f"{name}_tokens_per_line")
    if most_dense is not None and size.tokens_per_line > most_dense:
        complaints.append(f"{name} has {size.tokens_per_line} tokens a line; at most {most_dense}")
    most_any = limits.get(f"{name}_any")
    if most_any is not None and size.any_uses > most_any:
        complaints.append(f"{name} uses Any {size.any_uses} times; at most {most_any}")
    return complaints


def main() -> int:
    """Print the figures; 1 where one is above its limit."""
    if len(sys.argv) > 1:
        print_parts(Path(sys.argv[1]))
        return 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    limits = project["tool"]["tokenswift"]
    complaints = []
    for name in ("src", "tests"):
        size = folder_size(ROOT / name)
        print(
            f"{name}: {size.python_lines} lines of Python, {size.c_lines} of C, {size.tokens} "
            f"tokens, "
            f"{size.tokens_per_line} tokens a line, Any {size.any_uses} times"
        )
        complaints += over_limits(name, size, limits)
    print("\n".join(complaints), file=sys.stderr, end="\n" if complaints else "")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
