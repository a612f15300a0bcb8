"""What counts as a line of code."""

from __future__ import annotations

from scripts.sloc import c_lines, python_lines


def test_lines_of_code() -> None:
    assert (
        python_lines('"""Doc."""\n\n# why\nx = """a\nb"""  # two lines\n\ndef f():\n    """Doc\n    s."""\n')
        == 3
    )
    assert c_lines("/* a\n b */\nint a; // c\n\n#define A \\\n  1\n") == 3
