"""What counts as a line of code, a token and a use of Any, and that limits are held."""

from __future__ import annotations

from tools.sloc import Size, c_size, over_limits, python_size

PYTHON = '''"""Doc."""

# why
x: Any = """a
b"""  # two lines

def f():
    """Doc
    s."""
'''


def test_python_is_counted_without_comments_and_docstrings() -> None:
    size = python_size(PYTHON)
    assert size.python_lines == 3
    assert size.tokens == 10
    assert size.any_uses == 1


def test_c_is_counted_without_comments() -> None:
    assert c_size("/* a\n b */\nint a; // c\n\n#define A \\\n  1\n").c_lines == 3


def test_a_figure_above_its_limit_is_named() -> None:
    size = Size(python_lines=10, tokens=95, any_uses=4)
    limits = {"src_tokens_per_line": 9.4, "src_any": 3}
    assert over_limits("src", size, limits) == [
        "src has 9.5 tokens a line; at most 9.4",
        "src uses Any 4 times; at most 3",
    ]
    assert over_limits("src", size, {"src_tokens_per_line": 9.5, "src_any": 4}) == []
