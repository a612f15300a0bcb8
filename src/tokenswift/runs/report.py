"""What lists and reports say of runs: their figures, and one HTML page about a run or about many.

A page has no scripts and makes no requests. The text in it is marked in two ways at once. Where a token came
from is its colour and underline (the target's own tokens have none): one element per stretch of tokens of one
kind. A repeat, an n-gram that the text has had before, is a highlighted stretch. Blocks of the text are laid
out only when they come into view.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenswift.metrics import PREFILL, decoding, distinct
from tokenswift.runs import folder as folders
from tokenswift.runs.state import RunState
from tokenswift.spec.drafters.base import MARKS, mark_of
from tokenswift.types import InputError
from tokenswift.words import counted

LATEST = 253_402_000_000.0  # a date of a file may be anything; this one is in the year 9999
BINS = 24  # stretches, at most
REPEAT = 8  # tokens of an n-gram whose second occurrence counts as a repeat
BLOCK = 1000  # tokens of a block of the text
JUMPS = 20  # links into the text
#: letter of a source → its element; others have one of their own, such as k-x
ELEMENTS = {"t": "", "h": "i", "n": "b", "c": "u"}
#: columns of the table of many runs, see :func:`cells`
COLUMNS = ("run", "state", "tokens", "of", "tokens/s", "a pass", "sessions", "loop from", "last written")
#: figures (see :func:`summary_of`) whose sums are told of many runs
TOTALS = ("finished", "tokens", "max_new_tokens", "prompt_tokens", "sessions", "seconds")
#: of a journal: what says nothing about its run
INNER = ("kind", "time", "pid", "number", "start")
Rows = list[tuple[str, ...]]

# ---- figures of runs ---------------------------------------------------------------------------------------


def find(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else those in it that are, by name."""
    if os.path.lexists(folder / folders.JOURNAL):
        return [folder]
    return sorted(path for path in folder.iterdir() if os.path.lexists(path / folders.JOURNAL))


def summary_of(folder: Path) -> dict[str, Any]:
    """State and figures of a run; JSON values. An unreadable journal has only ``run`` and ``state``."""
    try:
        contents, state = folders.load(folder)
    except InputError as error:
        return {"run": str(folder), "state": f"unreadable: {error}"}
    spent, tokens = decoding(state.seconds), len(state.tokens)
    written = time.localtime(min(max(0.0, os.lstat(folder / folders.JOURNAL).st_mtime), LATEST))
    damaged = f"damaged at byte {contents.good}" if contents.damaged else ""
    return {
        "run": str(folder),
        "state": "running" if folders.is_locked(folder) else damaged or _word(state),
        "finished": state.end is not None,
        "tokens": tokens,
        "max_new_tokens": state.session.max_new_tokens,
        "prompt_tokens": len(state.prompt),
        "sessions": len(state.sessions),
        "tokens_per_second": tokens / spent if spent else 0.0,
        "tokens_a_pass": tokens / max(1, len(state.all_steps)),
        "seconds": spent,
        "prefill_seconds": state.seconds.get(PREFILL, 0.0),
        "loop_start": state.loop.start if state.loop else None,
        "model": state.header.name,
        "dtype": state.header.identity.dtype,
        "strategy": state.session.strategy,
        "seed": state.header.identity.sampling["seed"],
        "written": time.strftime("%Y-%m-%d %H:%M:%S", written),
    }


def _word(state: RunState) -> str:
    return f"finished ({state.end.reason})" if state.end else "interrupted"


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The figures of a run (see :func:`summary_of`) as tables show them, by column; of an unreadable one
    name and state alone."""
    if "tokens" not in row:
        return {"run": row["run"], "state": row["state"]}
    loop = row["loop_start"]
    return {
        "run": row["run"],
        "state": row["state"],
        "tokens": f"{row['tokens']:,}",
        "of": f"{row['max_new_tokens']:,}",
        "tokens/s": f"{row['tokens_per_second']:,.1f}",
        "a pass": f"{row['tokens_a_pass']:.2f}",
        "sessions": str(row["sessions"]),
        "loop from": "" if loop is None else f"{loop:,}",
        "model": f"{row['model']} ({row['dtype']})",
        "strategy": row["strategy"],
        "last written": row["written"],
    }


# ---- pages -------------------------------------------------------------------------------------------------


def page(state: RunState, name: str, running: bool = False) -> str:
    """The report of a run.

    Args:
        state: the run.
        name: of the run, for the title.
        running: whether a process writes it now.
    """
    marked, word = repeats(state.tokens), "running" if running else _word(state)
    starts = range(0, len(state.tokens), BLOCK)
    others = [(_tag(letter), mark_of(letter)) for letter in sorted(set(state.sources) - set(ELEMENTS))]
    return render(
        "run.html",
        title=f"Run {name}: {counted(len(state.tokens), 'token')}, {word}",
        figures=_figures(state, word, marked),
        sources=_sources(state),
        lengths=[
            (f"{one.end:,}", *map(number, one[1:5]), f"{one.repeated:.1%}") for one in bins(state, marked)
        ],
        cost=_cost(state),
        settings=_settings(state),
        others=[{"tag": tag, "title": of.title, "light": of.light, "dark": of.dark} for tag, of in others],
        repeat=REPEAT,
        jumps=starts[:: max(1, -(-len(starts) // JUMPS))],
        blocks=_blocks(state, marked, starts),
        tail=state.tail,
    )


def page_of_all(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """The report of all runs in a folder.

    Args:
        rows: their figures, as :func:`summary_of` gives them.
        name: of the folder, for the title.
    """
    known = [row for row in rows if "tokens" in row]
    done, tokens, most, prompts, sessions, seconds = (sum(row[key] for row in known) for key in TOTALS)
    models = Counter(f"{row['model']} ({row['dtype']})" for row in known)
    figures = [
        ("finished", f"{done:,} of {len(rows):,}"),
        ("new tokens", f"{tokens:,} of at most {most:,}"),
        ("prompt tokens", f"{prompts:,}"),
        ("tokens/s of each text, on average", number(tokens / seconds if seconds else None)),
        ("resumed", counted(sum(row["sessions"] > 1 for row in known), "text")),
        ("sessions", f"{sessions:,}"),
        ("repeat themselves", counted(sum(row["loop_start"] is not None for row in known), "text")),
        ("models", ", ".join(f"{model}: {count:,}" for model, count in models.most_common())),
    ]
    title = f"Runs in {name}: {done:,} of {len(rows):,} finished, {counted(tokens, 'token')}"
    named = [{**cells(row), "run": row["run"].rpartition("/")[2]} for row in rows]
    runs = [tuple(row.get(column, "") for column in COLUMNS) for row in named]
    return render("runs.html", title=title, figures=figures, head=COLUMNS, runs=runs)


_BAD = {code: 0xFFFD for code in (*range(9), 11, 12, *range(14, 32), 127)}


def render(template: str, **values: Any) -> str:
    """A template of ``templates`` with these values, escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tokenswift.runs"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value.translate(_BAD) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values).strip() + "\n"


def number(value: float | None) -> str:
    """A number as tables show it."""
    if value is None:
        return "–"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


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


class Bin(NamedTuple):
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


def bins(state: RunState, marked: Sequence[bool]) -> list[Bin]:
    """The run in stretches of about equal length.

    Args:
        marked: of each token, whether it is in a repeat.
    """
    size = max(1, -(-len(state.tokens) // BINS))
    made: list[Bin] = []
    steps: list[tuple[int, ...]] = []
    at = start = taken = timed = 0
    for session in state.steps:
        for before, step in zip([None, *session], session, strict=False):
            steps.append(step)
            at += step[0]
            if before is not None:  # the time of a session's first step is not known
                taken, timed = taken + step[5] - before[5], timed + step[0]
            if at - start >= size or at == len(state.tokens):
                speed = 1000 * timed / taken if taken else None
                accepted, by_ngrams, gamma = (sum(one[i] for one in steps) for i in (2, 3, 4))
                rates = accepted / (gamma or 1), by_ngrams / (gamma or 1)
                share = sum(marked[start:at]) / max(1, at - start)
                made.append(Bin(at, speed, (at - start) / len(steps), *rates, share))
                steps, start, taken, timed = [], at, 0, 0
    return made


def _figures(state: RunState, word: str, marked: Sequence[bool]) -> Rows:
    steps, tokens, spent = state.all_steps, len(state.tokens), decoding(state.seconds)
    gamma = sum(step[4] for step in steps) or 1
    ends = [sum(step[0] for step in session) for session in state.steps[:-1]]
    resumed = ", ".join(f"{sum(ends[: i + 1]):,}" for i in range(len(ends)))
    loop = "none found"
    if state.loop is not None:
        size = state.loop.size
        what = f"a pattern of {counted(size, 'token')}" if size else "n-grams nearly always accepted"
        loop = f"from token {state.loop.start:,} on: {what}"
    return [
        ("state", word),
        ("new tokens", f"{tokens:,} of at most {state.session.max_new_tokens:,}"),
        ("prompt tokens", f"{len(state.prompt):,}"),
        ("tokens a second", number(tokens / spent if spent else None)),
        ("decoding", f"{spent:,.1f} s"),
        ("prefill, all sessions", f"{state.seconds.get(PREFILL, 0.0):,.1f} s"),
        ("passes", f"{len(steps):,} (and {state.passes:,} to draft)"),
        ("tokens a pass", number(tokens / len(steps) if steps else None)),
        ("acceptance rate α", number(sum(step[2] for step in steps) / gamma)),
        ("by n-grams, β", number(sum(step[3] for step in steps) / gamma)),
        ("Distinct-1, -2, -3, -4", ", ".join(f"{distinct(state.tokens, n):.2f}" for n in range(1, 5))),
        ("tokens in repeats", f"{sum(marked) / tokens:.1%}" if tokens else "–"),
        ("sessions", f"{len(state.sessions)}; {f'resumed at token {resumed}' if ends else 'never resumed'}"),
        ("loop", loop),
    ]


def _sources(state: RunState) -> Rows:
    """How many tokens came from each source: of all that are known, and of those of the run."""
    letters = dict.fromkeys([*(mark.letter for mark in MARKS.values()), *sorted(set(state.sources))])
    every = max(1, len(state.tokens))
    counts = {letter: state.sources.count(letter) for letter in letters}
    return [(mark_of(letter).title, f"{count:,}", f"{count / every:.1%}") for letter, count in counts.items()]


def _tag(letter: str) -> str:
    """The element of a source's tokens; "" for none."""
    return ELEMENTS.get(letter, f"k-{letter.lower()}")


def _cost(state: RunState) -> Rows:
    total = sum(state.seconds.values()) or 1.0
    phases = sorted(state.seconds.items(), key=lambda item: -item[1])
    return [(phase, f"{value:,.1f} s", f"{value / total:.1%}") for phase, value in phases]


def _settings(state: RunState) -> Rows:
    """What the journal says of the run, by its names."""
    header = state.header
    rows = [("model", header.name), ("begun", time.strftime("%Y-%m-%d %H:%M", time.localtime(header.made)))]
    for part in (header.identity, state.session):
        for key, value in msgspec.to_builtins(part).items():
            several = value.items() if isinstance(value, dict) else [("", value)]
            rows += [(f"{key} {name}".strip().replace("_", " "), str(one)) for name, one in several]
    return [row for row in rows if row[0] not in INNER]


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
