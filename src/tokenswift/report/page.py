"""One HTML page about a run: no scripts, no requests, light and dark, tables beside pictures.

The text is marked in two ways at once. Where a token came from is its colour and underline (the target's own
tokens have none): one element per stretch of tokens of one kind. A repeat, an n-gram that the text has had
before, is a highlighted stretch. Blocks of the text are laid out only when they come into view.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import groupby

from tokenswift.drafters.registry import mark_of, marks
from tokenswift.report import figures
from tokenswift.report.plots import Line, number, plot
from tokenswift.runs.state import RunState

BLOCK = 1000  # tokens of a block of the text
#: letter of a source → its element; others have one of their own, such as k-x
ELEMENTS = {"t": "", "h": "i", "n": "b", "c": "u"}
JUMPS = 20  # links into the text
_BAD = {code: 0xFFFD for code in (*range(9), 11, 12, *range(14, 32), 127)}


def page(state: RunState, name: str, running: bool = False) -> str:
    """The report of a run.

    Args:
        state: the run.
        name: of the run, for the title.
        running: whether a process writes it now.
    """
    marked = figures.repeats(state.tokens)
    style = resources.files("tokenswift").joinpath("report/style.css").read_text(encoding="utf-8")
    style += _colours(state)
    word = "running" if running else f"finished ({state.end.reason})" if state.end else "interrupted"
    title = f"Run {name}: {len(state.tokens):,} tokens, {word}"
    sections = [
        ("figures", "Figures", _figures(state, word, marked)),
        ("length", "Against length", _plots(state, marked)),
        ("cost", "Where the time went", _cost(state)),
        ("settings", "Settings", _settings(state)),
        ("text", "Text", _text(state, marked)),
    ]
    links = "".join(f'<li><a href="#{key}">{head}</a></li>' for key, head, _ in sections)
    body = "".join(
        f'<section aria-labelledby="{key}"><h2 id="{key}">{head}</h2>{content}</section>'
        for key, head, content in sections
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_clean(title)}</title><style>{style}</style></head><body>"
        '<a class="skip" href="#text">Skip to the text</a>'
        f'<header><h1>{_clean(title)}</h1><nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f"<main>{body}</main></body></html>\n"
    )


def _clean(text: str) -> str:
    return escape(text.translate(_BAD), quote=False)


def _table(caption: str, rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table whose first column names the row."""
    top = "".join(f"<th scope=col>{_clean(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th scope=row>{_clean(first)}</th>" + "".join(f"<td>{_clean(c)}</td>" for c in cells) + "</tr>"
        for first, *cells in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{_clean(caption)}</caption>{f'<thead><tr>{top}</tr></thead>' if head else ''}"
        f"<tbody>{body}</tbody></table></div>"
    )


def _figures(state: RunState, word: str, marked: Sequence[bool]) -> str:
    steps, tokens = state.all_steps, len(state.tokens)
    gamma = sum(step[4] for step in steps) or 1
    decoding = sum(value for phase, value in state.seconds.items() if phase != "prefill")
    resumed = ", ".join(f"{at:,}" for at in figures.resumed_at(state)) or "never"
    rows = [
        ("state", word),
        ("new tokens", f"{tokens:,} of at most {state.session.max_new_tokens:,}"),
        ("prompt tokens", f"{len(state.prompt):,}"),
        ("tokens a second", number(tokens / decoding if decoding else None)),
        ("decoding", f"{decoding:,.1f} s"),
        ("prefill, all sessions", f"{state.seconds.get('prefill', 0.0):,.1f} s"),
        ("passes", f"{len(steps):,} (and {state.passes:,} to draft)"),
        ("tokens a pass", number(tokens / len(steps) if steps else None)),
        ("acceptance rate α", number(sum(step[2] for step in steps) / gamma)),
        ("by n-grams, β", number(sum(step[3] for step in steps) / gamma)),
        ("Distinct-1, -2, -3, -4", ", ".join(f"{value:.2f}" for value in figures.distincts(state.tokens))),
        ("tokens in repeats", f"{sum(marked) / tokens:.1%}" if tokens else "–"),
        ("sessions", f"{len(state.sessions)}; resumed at token {resumed}"),
        ("loop", _loop(state)),
    ]
    counts = [
        (name, f"{state.sources.count(letter):,}", f"{state.sources.count(letter) / max(1, tokens):.1%}")
        for letter, name in _kinds(state).items()
    ]
    return _table("The run", rows) + _table("Where tokens came from", counts, ("source", "tokens", "share"))


def _kinds(state: RunState) -> dict[str, str]:
    """Letters of sources and what they are: all that are known, and those of the run."""
    letters = [mark.letter for mark in marks().values()]
    return {
        letter: mark_of(letter).title for letter in dict.fromkeys([*letters, *sorted(set(state.sources))])
    }


def _guests(state: RunState) -> dict[str, str]:
    """Letters of drafters of other packages that drafted in this run → their elements."""
    return {letter: f"k-{letter.lower()}" for letter in sorted(set(state.sources) - set(ELEMENTS))}


def _colours(state: RunState) -> str:
    """Style of their elements."""
    rules = ""
    for letter, tag in _guests(state).items():
        mark = mark_of(letter)
        rules += f"{tag}{{color:light-dark({mark.light},{mark.dark});text-decoration:underline dashed}}"
        rules += f"body:has(#sources:not(:checked)) .words {tag}{{color:inherit;text-decoration:none}}"
    return rules


def _loop(state: RunState) -> str:
    if state.loop is None:
        return "none found"
    what = f"a pattern of {state.loop.size} tokens" if state.loop.size else "n-grams nearly always accepted"
    return f"from token {state.loop.start:,} on: {what}"


def _plots(state: RunState, marked: Sequence[bool]) -> str:
    rows = figures.bins(state, marked)
    if not rows:
        return "<p>No tokens yet.</p>"
    places, marks = [row.end for row in rows], figures.resumed_at(state)
    return (
        plot("Speed", places, [Line("tokens a second", [r.speed for r in rows])], "tokens a second", marks)
        + plot("Tokens a pass", places, [Line("tokens a pass", [r.length for r in rows])], "tokens", marks)
        + plot(
            "Acceptance",
            places,
            [Line("α, all drafts", [r.alpha for r in rows]), Line("β, n-grams", [r.beta for r in rows])],
            "accepted of drafted depth",
            marks,
        )
        + plot("Repeats", places, [Line("in repeats", [r.repeated for r in rows])], "share of tokens", marks)
    )


def _cost(state: RunState) -> str:
    total = sum(state.seconds.values()) or 1.0
    rows = [
        (phase, f"{value:,.1f} s", f"{value / total:.1%}")
        for phase, value in sorted(state.seconds.items(), key=lambda item: -item[1])
    ]
    bars = "".join(
        f'<div class="bar"><span style="width:{100 * value / total:.2f}%"></span></div>'
        for _, value in sorted(state.seconds.items(), key=lambda item: -item[1])
    )
    table = _table("Seconds by phase", rows, ("phase", "seconds", "share"))
    return f'<div class="cost">{table}<div class="bars" aria-hidden="true">{bars}</div></div>'


def _settings(state: RunState) -> str:
    identity, session = state.header.identity, state.session
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(state.header.made))
    numerics, adapter = session.numerics, identity.adapter
    rows = [
        ("model", state.header.name),
        ("weights, config (digests)", f"{identity.weights}, {identity.config}"),
        ("adapter", "none" if adapter is None else f"{', '.join(adapter.names)} ({adapter.digest})"),
        ("dtype, device", f"{identity.dtype}, {numerics['device']}, {session.threads} threads"),
        ("computed by", f"{numerics['how']}" + ("" if numerics["equal_bits"] else " (bits not equal)")),
        ("positions", identity.rope),
        ("strategy", session.strategy),
        *((f"option {key}", str(value)) for key, value in session.options.items()),
        *((key.replace("_", " "), str(value)) for key, value in identity.sampling.items()),
        ("acceptance", identity.acceptance),
        ("stop", ", ".join(map(repr, identity.stop)) or "none"),
        ("end-of-text tokens", ", ".join(map(str, identity.eos)) or "ignored"),
        ("on a loop", session.on_loop),
        ("begun", made),
        *session.versions.items(),
    ]
    return _table("What the run was asked for", rows)


def _text(state: RunState, marked: Sequence[bool]) -> str:
    guests = ((mark_of(letter).title, tag) for letter, tag in _guests(state).items())
    more = "".join(f", as from a <{tag}>{_clean(title)}</{tag}>" for title, tag in guests)
    legend = (
        '<p class="legend">Tokens of the model\'s own choice are plain; from a <i>draft head</i>, an '
        "<b>n-gram of the text</b> or a <u>drafted chain</u> they have a colour and an underline of their "
        f"own{more}. A <mark>repeat</mark> is {figures.REPEAT} tokens or more that the text has had "
        "before.</p>"
        '<p class="switches"><label><input type="checkbox" id="sources" checked> show sources</label> '
        '<label><input type="checkbox" id="repeats" checked> show repeats</label></p>'
    )
    starts = range(0, len(state.tokens), BLOCK)
    every = max(1, -(-len(starts) // JUMPS))
    jumps = "".join(f'<li><a href="#t{start}">{start:,}</a></li>' for start in starts[::every])
    blocks: list[str] = []
    at = 0
    for start in starts:
        end = min(start + BLOCK, len(state.tokens))
        length = sum(state.chars[start:end])
        blocks.append(_block(state, marked, start, end, at))
        at += length
    tail = f"<p lang=''>{_clean(state.tail)}</p>" if state.tail else ""
    nav = f'<nav aria-label="Places in the text"><ul class="jumps">{jumps}</ul></nav>'
    return f'{legend}{nav}<div class="words">{"".join(blocks)}{tail}</div>'


def _block(state: RunState, marked: Sequence[bool], start: int, end: int, at: int) -> str:
    """Tokens of the text, stretch by stretch."""
    out: list[str] = []
    keys = [(marked[i], state.sources[i]) for i in range(start, end)]
    i = start
    for repeated, group in groupby(keys, key=lambda key: key[0]):
        if repeated:
            out.append("<mark>")
        for letter, run in groupby(group, key=lambda key: key[1]):
            count = sum(1 for _ in run)
            length = sum(state.chars[i : i + count])
            text = _clean(state.text[at : at + length])
            tag = ELEMENTS.get(letter, f"k-{letter.lower()}")
            out.append(f"<{tag}>{text}</{tag}>" if tag and text else text)
            i, at = i + count, at + length
        if repeated:
            out.append("</mark>")
    label = f"tokens {start:,} to {end - 1:,}"
    head = f'<div class="block" id="t{start}"><h3>{label}</h3>'
    return f'{head}<div class="run" lang="">{"".join(out)}</div></div>'
