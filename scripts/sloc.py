"""Lines of code of src, held under a number in pyproject.toml that only falls.

    python scripts/sloc.py [FOLDER]

With a folder of src/tokenswift, or another: the lines of each folder and file directly in it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
    tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def python_lines(text: str) -> int:
    """Lines that hold code: no blanks, comments and docstrings."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                docstrings.add((first.lineno, first.col_offset))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.start not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def c_lines(text: str) -> int:
    """Lines that hold code: no blanks and comments."""
    bare = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    return sum(bool(re.sub(r"//.*", "", line).strip()) for line in bare.splitlines())


def lines_of(file: Path) -> int:
    """Lines of code of a Python or C file."""
    return (python_lines if file.suffix == ".py" else c_lines)(file.read_text(encoding="utf-8"))


def main() -> int:
    """Print the figure; 1 where it is above the number."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src"
    parts: Counter[str] = Counter()
    files = [file for file in folder.rglob("*") if file.suffix in (".py", ".c", ".h")]
    for file in files:
        parts[file.relative_to(folder).parts[0]] += lines_of(file)
    if len(sys.argv) > 1:
        print("\n".join(f"{lines:6} {name}" for name, lines in sorted(parts.items())))
        print(f"{parts.total():6} in {len(files)} files")
        return 0
    most = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["tokenswift"]["sloc"]
    print(f"src: {parts.total()} lines of code; at most {most}")
    return int(parts.total() > most)


if __name__ == "__main__":
    sys.exit(main())
