"""One HTML page about a run, or about many: no scripts, no requests, light and dark, tables.

The text is marked in two ways at once. Where a token came from is its colour and underline (the target's own
tokens have none): one element per stretch of tokens of one kind. A repeat, an n-gram that the text has had
before, is a highlighted stretch. Blocks of the text are laid out only when they come into view.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tokenswift.metrics import decoding, distinct
from tokenswift.runs.listing import cells
from tokenswift.runs.state import RunState
from tokenswift.spec.drafters.registry import mark_of, marks
from tokenswift.words import counted

BINS = 24  # stretches, at most
REPEAT = 8  # tokens of an n-gram whose second occurrence counts as a repeat
#: of a step: tokens, accepted, accepted of n-grams, γ, ms since the step before (None: not known)
TimedStep = tuple[int, int, int, int, int | None]


@dataclass(frozen=True, slots=True)
class Bin:
    """A stretch of the text.

    Attributes:
        end: new tokens at its end.
        speed: tokens a second; None where no time is known.
        length: tokens a pass.
        alpha, beta: acceptance rates of drafted depth, all and by n-grams.
        repeated: share of tokens in repeats.
    """

    end: int
    speed: float | None
    length: float
    alpha: float
    beta: float
    repeated: float


def repeats(tokens: Sequence[int], n: int = REPEAT) -> list[bool]:
    """For each token whether it lies in an n-gram that the text has had before (overlaps count)."""
    seen: set[tuple[int, ...]] = set()
    marked = [False] * len(tokens)
    for at in range(len(tokens) - n + 1):
        gram = tuple(tokens[at : at + n])
        if gram in seen:
            marked[at : at + n] = [True] * n
        else:
            seen.add(gram)
    return marked


def bins(state: RunState, marked: Sequence[bool]) -> list[Bin]:
    """The run in stretches of about equal length.

    Args:
        marked: of each token, whether it is in a repeat.
    """
    size = max(1, -(-len(state.tokens) // BINS))
    made: list[Bin] = []
    steps: list[TimedStep] = []
    at = start = 0
    for step in _timed(state):
        steps.append(step)
        at += step[0]
        if at - start >= size or at == len(state.tokens):
            made.append(_bin(steps, at, marked[start:at]))
            steps, start = [], at
    return made


def _timed(state: RunState) -> Iterator[TimedStep]:
    for session in state.steps:
        last: int | None = None
        for tokens, _, accepted, ngram, gamma, ms in session:
            yield tokens, accepted, ngram, gamma, None if last is None else ms - last
            last = ms


def _bin(steps: Sequence[TimedStep], end: int, marked: Sequence[bool]) -> Bin:
    timed = [(step[0], step[4]) for step in steps if step[4] is not None]
    seconds = sum(ms for _, ms in timed) / 1000
    gamma = sum(step[3] for step in steps) or 1
    return Bin(
        end,
        sum(tokens for tokens, _ in timed) / seconds if seconds else None,
        len(marked) / len(steps),
        sum(step[1] for step in steps) / gamma,
        sum(step[2] for step in steps) / gamma,
        sum(marked) / max(1, len(marked)),
    )


def resumed_at(state: RunState) -> list[int]:
    """New tokens at which sessions after the first began."""
    ends, at = [], 0
    for session in state.steps[:-1]:
        at += sum(step[0] for step in session)
        ends.append(at)
    return ends


_BAD = {code: 0xFFFD for code in (*range(9), 11, 12, *range(14, 32), 127)}


def render(template: str, **values: Any) -> str:
    """A template of ``report/templates`` with these values; those of ``.html`` are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("tokenswift.runs.report"),
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        finalize=lambda value: value.translate(_BAD) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["plain"] = plain
    return environment.get_template(template).render(values).strip() + "\n"


def plain(text: str) -> str:
    """Text as Markdown, on one line, without markup of its own."""
    return re.sub(r"([\\`*_{}\[\]<>#|~!])", r"\\\1", " ".join(text.split()))


BLOCK = 1000  # tokens of a block of the text
#: letter of a source → its element; others have one of their own, such as k-x
ELEMENTS = {"t": "", "h": "i", "n": "b", "c": "u"}
JUMPS = 20  # links into the text
#: columns of the table of many runs, see `runs.listing.cells`
COLUMNS = ("run", "state", "tokens", "of", "tokens/s", "a pass", "sessions", "loop from", "last written")
Rows = list[tuple[str, ...]]


def page(state: RunState, name: str, running: bool = False) -> str:
    """The report of a run.

    Args:
        state: the run.
        name: of the run, for the title.
        running: whether a process writes it now.
    """
    marked = repeats(state.tokens)
    word = "running" if running else f"finished ({state.end.reason})" if state.end else "interrupted"
    starts = range(0, len(state.tokens), BLOCK)
    return render(
        "run.html",
        title=f"Run {name}: {counted(len(state.tokens), 'token')}, {word}",
        figures=_figures(state, word, marked),
        sources=_sources(state),
        lengths=_lengths(state, marked),
        cost=_cost(state),
        settings=_settings(state),
        others=_others(state),
        repeat=REPEAT,
        jumps=starts[:: max(1, -(-len(starts) // JUMPS))],
        blocks=_blocks(state, marked, starts),
        tail=state.tail,
    )


def page_of_all(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """The report of all runs in a folder.

    Args:
        rows: their figures, as `runs.listing.summary_of` gives them.
        name: of the folder, for the title.
    """
    known = [row for row in rows if "tokens" in row]

    def total(key: str) -> Any:
        return sum(row[key] for row in known)

    finished, seconds = total("finished"), total("seconds")
    models = Counter(f"{row['model']} ({row['dtype']})" for row in known)
    looping = sum(row["loop_start"] is not None for row in known)
    summary = [
        ("finished", f"{finished:,} of {len(rows):,}"),
        ("new tokens", f"{total('tokens'):,} of at most {total('max_new_tokens'):,}"),
        ("prompt tokens", f"{total('prompt_tokens'):,}"),
        ("tokens/s of each text, on average", number(total("tokens") / seconds if seconds else None)),
        ("resumed", counted(sum(row["sessions"] > 1 for row in known), "text")),
        ("sessions", f"{total('sessions'):,}"),
        ("repeat themselves", counted(looping, "text")),
        ("models", ", ".join(f"{model}: {count:,}" for model, count in models.most_common())),
    ]
    title = f"Runs in {name}: {finished:,} of {len(rows):,} finished, {counted(total('tokens'), 'token')}"
    named = [{**cells(row), "run": row["run"].rpartition("/")[2]} for row in rows]
    runs = [tuple(row.get(column, "") for column in COLUMNS) for row in named]
    return render("runs.html", title=title, figures=summary, head=COLUMNS, runs=runs)


def _figures(state: RunState, word: str, marked: Sequence[bool]) -> Rows:
    steps, tokens = state.all_steps, len(state.tokens)
    gamma = sum(step[4] for step in steps) or 1
    spent = decoding(state.seconds)
    resumed = ", ".join(f"{at:,}" for at in resumed_at(state))
    again = f"resumed at token {resumed}" if resumed else "never resumed"
    return [
        ("state", word),
        ("new tokens", f"{tokens:,} of at most {state.session.max_new_tokens:,}"),
        ("prompt tokens", f"{len(state.prompt):,}"),
        ("tokens a second", number(tokens / spent if spent else None)),
        ("decoding", f"{spent:,.1f} s"),
        ("prefill, all sessions", f"{state.seconds.get('prefill', 0.0):,.1f} s"),
        ("passes", f"{len(steps):,} (and {state.passes:,} to draft)"),
        ("tokens a pass", number(tokens / len(steps) if steps else None)),
        ("acceptance rate α", number(sum(step[2] for step in steps) / gamma)),
        ("by n-grams, β", number(sum(step[3] for step in steps) / gamma)),
        ("Distinct-1, -2, -3, -4", ", ".join(f"{distinct(state.tokens, n):.2f}" for n in range(1, 5))),
        ("tokens in repeats", f"{sum(marked) / tokens:.1%}" if tokens else "–"),
        ("sessions", f"{len(state.sessions)}; {again}"),
        ("loop", _loop(state)),
    ]


def _sources(state: RunState) -> Rows:
    """How many tokens came from each source: of all that are known, and of those of the run."""
    letters = [mark.letter for mark in marks().values()]
    counts = {letter: state.sources.count(letter) for letter in [*letters, *sorted(set(state.sources))]}
    every = max(1, len(state.tokens))
    return [(mark_of(letter).title, f"{count:,}", f"{count / every:.1%}") for letter, count in counts.items()]


def _tag(letter: str) -> str:
    """The element of a source's tokens; "" for none."""
    return ELEMENTS.get(letter, f"k-{letter.lower()}")


def _others(state: RunState) -> list[dict[str, str]]:
    """The drafters of other packages that drafted in this run: element, title and colours."""
    found = [(_tag(letter), mark_of(letter)) for letter in sorted(set(state.sources) - set(ELEMENTS))]
    return [{"tag": tag, "title": mark.title, "light": mark.light, "dark": mark.dark} for tag, mark in found]


def _loop(state: RunState) -> str:
    loop = state.loop
    if loop is None:
        return "none found"
    what = f"a pattern of {counted(loop.size, 'token')}" if loop.size else "n-grams nearly always accepted"
    return f"from token {loop.start:,} on: {what}"


def number(value: float | None) -> str:
    """A number as tables show it."""
    if value is None:
        return "–"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _lengths(state: RunState, marked: Sequence[bool]) -> Rows:
    """The run in stretches: up to which token, and the figures of each."""
    return [
        (f"{row.end:,}", *map(number, (row.speed, row.length, row.alpha, row.beta)), f"{row.repeated:.1%}")
        for row in bins(state, marked)
    ]


def _cost(state: RunState) -> Rows:
    total = sum(state.seconds.values()) or 1.0
    phases = sorted(state.seconds.items(), key=lambda item: -item[1])
    return [(phase, f"{value:,.1f} s", f"{value / total:.1%}") for phase, value in phases]


def _settings(state: RunState) -> Rows:
    identity, session = state.header.identity, state.session
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(state.header.made))
    numerics, adapter = session.numerics, identity.adapter
    return [
        ("model", state.header.name),
        ("weights, config (digests)", f"{identity.weights}, {identity.config}"),
        ("adapter", "none" if adapter is None else f"{', '.join(adapter.names)} ({adapter.digest})"),
        ("dtype, device", f"{identity.dtype}, {numerics['device']}, {counted(session.threads, 'thread')}"),
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


def _blocks(state: RunState, marked: Sequence[bool], starts: range) -> list[dict[str, Any]]:
    """The text in blocks of tokens; each is repeats and what is between them, in stretches of one source."""
    blocks: list[dict[str, Any]] = []
    at = 0
    for start in starts:
        end = min(start + BLOCK, len(state.tokens))
        parts: list[tuple[bool, list[tuple[str, str]]]] = []
        for repeated, group in groupby(range(start, end), key=lambda i: marked[i]):
            stretches = []
            for letter, run in groupby(group, key=lambda i: state.sources[i]):
                length = sum(state.chars[i] for i in run)
                stretches.append((_tag(letter) if length else "", state.text[at : at + length]))
                at += length
            parts.append((repeated, stretches))
        blocks.append({"start": start, "end": end, "stretches": parts})
    return blocks
