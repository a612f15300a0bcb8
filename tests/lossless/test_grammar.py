"""Texts that follow a grammar: every strategy, batch and resumed run against plain decoding under
the same grammar, and plain decoding against masks made by hand."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer, models

from tests.conftest import tiny_tokenizer
from tests.default_model import default_llm
from tests.lossless.test_tokens import random_heads, same
from tests.runs.common import Stop, after
from tests.speculation.drafters.prices import fix_prices
from tests.stats import chi_square
from tests.tiny import byte_model
from tokenswift import LLM, Grammar, InputError, RunError, SamplingParams, resume
from tokenswift.engine.many import run_all
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.loader.plain_tokenizer import PlainTokenizer
from tokenswift.sampling.grammars import Grammars
from tokenswift.sampling.masks import LEFT, Masks, NoMask
from tokenswift.sampling.rows import allowed_tokens
from tokenswift.speculation import accept as acceptance
from tokenswift.speculation.accept import accept_exact
from tokenswift.speculation.drafters.base import Candidates, Outcome
from tokenswift.speculation.drafters.lookup import GrammarDrafter
from tokenswift.types import DraftTree

END = 257
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 99},
        "colour": {"enum": ["green", "grey", "red"]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["identifier", "colour", "sizes"],
    "additionalProperties": False,
}
#: too many ways to read a text for llguidance, from about 30 letters on
GROWING = "(([ab]{1,1000}){1,1000}){60,1000}"
LISP = 'start: "(" [word (" " word)*] ")"\nword: /[a-c]{1,3}/ | start\n'
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex("(ab|ac){2,9}x{3,40}[0-9]{5,30}"),
    "choice": Grammar.choice(["yes", "yes, but not now", "no"]),
    "lark": Grammar.lark(LISP),
    "rules": Grammar.lark('start: ("a" | "bc")+ "." /[0-9]/ /[0-9]/*'),
}
GREEDY = SamplingParams(greedy=True, repetition_penalty=1.2, penalty_window=20)
SEEDED = SamplingParams(temperature=1.2, top_p=0.95, min_p=0.01, penalty_window=12, seed=4)
RUNS: list[tuple[str, dict[str, object]]] = [
    ("auto", {}),
    ("auto", {"draft": "hidden", "ngrams": 0}),
    ("tokenswift", {"tree": (1, 3, 3), "ngrams": 4, "draft": "partial", "budget": 24, "sinks": 3}),
    (
        "tokenswift",
        {"tree": (3, 2, 2), "ngrams": 6, "draft": "hidden", "candidates": "probability"},
    ),
    ("magicdec", {"gamma": 3, "kv": "snapkv", "budget": 24, "sinks": 3}),
]


def byte_llm() -> LLM:
    """A tiny model over bytes, with untrained heads."""
    return LLM.from_model(
        byte_model(), tiny_tokenizer(), heads=random_heads("conditioned", 32, 260)
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch, byte_llm() as opened:
        fix_prices(patch, 1e-4)  # a row costs nothing, so whatever may come is drafted
        yield opened


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_strategy_writes_what_plain_decoding_writes(llm: LLM, name: str) -> None:
    accepted = 0
    for params in (GREEDY, *(replace(SEEDED, seed=seed) for seed in (4, 5))):
        params = replace(params, grammar=GRAMMARS[name])
        plain = llm.generate("abc yes abc {", 90, "autoregressive", sampling=params)
        for strategy, options in RUNS:
            got = llm.generate("abc yes abc {", 90, strategy, options, params)
            assert same(plain, got), (strategy, options, params)
            accepted += len(got.token_ids) - got.token_sources["target"]
        if name == "schema" and plain.finish_reason == "eos":
            assert set(json.loads(plain.text)) == set(SCHEMA["required"])
        if name == "choice":
            assert plain.text in ("yes", "yes, but not now", "no")
            assert plain.token_ids[-1] == END
    assert accepted > 20


def test_a_batch_of_grammars_and_none(llm: LLM) -> None:
    """Texts that share passes keep their own grammars."""
    samplings = [
        replace(SEEDED, seed=i, grammar=g) for i, g in enumerate((None, *GRAMMARS.values()))
    ]
    requests = [
        Request("abc " * (i + 1), 60, sampling=params) for i, params in enumerate(samplings)
    ]
    alone = [
        llm.generate("abc " * (i + 1), 60, "autoregressive", sampling=params)
        for i, params in enumerate(samplings)
    ]
    with Scheduler(llm, 4) as scheduler:
        for i, got in run_all(scheduler, requests):
            assert not isinstance(got, Exception), i
            assert same(alone[i], got), i


def test_a_resumed_run_follows_its_grammar(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_prices(monkeypatch, 1.0)
    params = replace(SEEDED, grammar=GRAMMARS["schema"])
    uninterrupted = llm.generate("abc", 90, "autoregressive", sampling=params)
    for steps in (1, 9):
        folder = tmp_path / str(steps)
        with pytest.raises(Stop):
            llm.generate("abc", 90, sampling=params, run_dir=folder, on_step=after(steps))
        got = resume(folder, llm=llm)
        assert same(uninterrupted, got)
        assert got.text == uninterrupted.text
        with pytest.raises(InputError, match="holds another run: grammar is None"):
            llm.generate("abc", 90, sampling=SEEDED, run_dir=folder)


# ---- against masks made by hand ------------------------------------------------------------------

TEXTS = ["ab", "ac", "b", "bca", "bcb"]


@torch.inference_mode()
def by_hand(llm: LLM, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of each text of `TEXTS`, by transformers' own passes, masks that are looked
    up in the list, and a softmax."""
    ends = [(*text.encode("ascii"), END) for text in TEXTS]
    ids = llm.tokenizer.convert_tokens_to_ids
    ends = [tuple(ids(chr(token)) if token != END else END for token in text) for text in ends]
    chances: dict[tuple[int, ...], float] = {}
    for text in ends:
        chance = 1.0
        for i, token in enumerate(text):
            row = (
                llm.model(torch.tensor([[*prompt, *text[:i]]])).logits[0, -1].double()
                / params.temperature
            )
            allowed = sorted(
                {other[i] for other in ends if other[:i] == text[:i] and len(other) > i}
            )
            shares = row[allowed].softmax(0)
            chance *= float(shares[allowed.index(token)])
        chances[text] = chance
    assert sum(chances.values()) == pytest.approx(1.0)
    return chances


@pytest.mark.parametrize("strategy", ["autoregressive", "tokenswift"])
def test_the_distribution_is_that_of_masks_made_by_hand(llm: LLM, strategy: str) -> None:
    params = SamplingParams(temperature=0.03, min_p=0.0, repetition_penalty=1.0)
    prompt = llm.encode("abc")
    options = {"tree": (2, 2)} if strategy == "tokenswift" else None
    exact = by_hand(llm, prompt, params)
    grammar = Grammar.choice(TEXTS)
    seen = [
        tuple(
            llm.generate(
                prompt, 9, strategy, options, replace(params, seed=seed, grammar=grammar)
            ).token_ids
        )
        for seed in range(400)
    ]
    assert chi_square(seen, exact) > 1e-4
    other = SamplingParams(temperature=0.1, min_p=0.0, repetition_penalty=1.0)
    assert chi_square(seen, by_hand(llm, prompt, other)) < 1e-6  # it would be seen


def test_log_probabilities_are_those_of_the_masked_row(llm: LLM) -> None:
    grammar = Grammar.choice(["aa", "ab"])
    result = llm.generate("x", 5, grammar=grammar, logprobs=5, min_p=0.0)
    assert [len(one.top) for one in result.logprobs] == [1, 2, 1]
    assert result.logprobs[0].logprob == result.logprobs[2].logprob == 0.0


# ---- masks along paths ---------------------------------------------------------------------------


def masks_of(grammar: Grammar, start: int = 0) -> Masks:
    return Grammars(tiny_tokenizer(), 270, lambda: {END, 258}).masks(grammar, start)


def allowed_by(masks: Masks, history: list[int], path: list[int]) -> torch.Tensor | None:
    """A mask as one truth value a token, the width of the logits being 270."""
    words = masks.allowed(history, path)
    return None if words is None else allowed_tokens(words[None], 270)[0]


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_mask_is_that_of_its_path_wherever_the_matcher_stood(name: str) -> None:
    """A walk through random paths, right and wrong ones, ends of text among them, against matchers
    that were never anywhere else; padding rows are never allowed."""
    rnd = random.Random(name)
    used = masks_of(GRAMMARS[name], 2)
    history = [0, 1]
    paths = 0
    for _ in range(14):
        known: list[list[int]] = [[]]
        for _ in range(9):
            path = rnd.choice(known)
            fresh = fresh_along(name, history, path)
            mask = allowed_by(used, history, path)
            assert (mask is None) == (fresh is None)
            if mask is None or fresh is None:
                continue
            assert torch.equal(mask, fresh)
            assert len(mask) == 270
            assert not mask[259:].any()
            good = mask.nonzero().squeeze(1).tolist()
            wrong = next(token for token in range(256) if not mask[token])
            assert (
                used.reach(history, [*path, good[0]])
                == used.reach(history, path) + 1
                == len(path) + 1
            )
            assert used.reach(history, [*path, wrong, good[0]]) == len(path)
            assert used.forced(history) == fresh_forced(name, tuple(history))
            for end in used.ends:  # it counts where it may come
                assert used.reach(history, [*path, end]) == len(path) + bool(mask[end])
            known += [[*path, token] for token in (*rnd.sample(good, min(2, len(good))), wrong)]
            paths += 1
        allowed = fresh_mask(name, tuple(history))
        assert allowed is not None
        going_on = [
            token for token in allowed.nonzero().squeeze(1).tolist() if token not in used.ends
        ]
        if not going_on:
            break
        history = [*history, rnd.choice(going_on)]
    assert paths > 15


@cache
def fresh_mask(name: str, tokens: tuple[int, ...]) -> torch.Tensor | None:
    """The mask behind a text, by a matcher that was never anywhere else."""
    return allowed_by(masks_of(GRAMMARS[name], 2), list(tokens), [])


@cache
def fresh_forced(name: str, tokens: tuple[int, ...]) -> tuple[list[int], int]:
    """What is forced behind a text, by a matcher that was never anywhere else."""
    return masks_of(GRAMMARS[name], 2).forced(list(tokens))


def fresh_along(name: str, history: list[int], path: list[int]) -> torch.Tensor | None:
    """The mask behind a path; None where the path leaves the grammar, or goes on behind its end."""
    for length, token in enumerate(path):
        mask = fresh_mask(name, (*history, *path[:length]))
        if mask is None or not mask[token] or token in (END, 258):
            return None
    return fresh_mask(name, (*history, *path))


def test_what_is_forced() -> None:
    masks = Grammars(tiny_tokenizer(), 260, lambda: {END}).masks(GRAMMARS["schema"], 0)
    tokens, sure = masks.forced([])
    assert tokens[:sure] == ids_of('{"identifier": ')
    assert sure == len(tokens)
    text = ids_of('{"identifier": 7, "colour": "r')
    assert masks.forced(text)[0] == ids_of('ed", "sizes": [')
    rest = masks.forced([*text, *ids_of('ed", "sizes": [true, true, t')])
    assert rest == ([*ids_of("rue]}"), END], 6)
    assert masks.forced(text + ids_of('ed", "sizes": [true, true, true]}')) == ([END], 1)


def test_forced_text_comes_in_few_steps(llm: LLM) -> None:
    """One step for each choice that the model has, and one for what is forced behind it."""
    got = llm.generate("abc", 90, sampling=replace(GREEDY, grammar=GRAMMARS["schema"]))
    forced = len('{"identifier": ') + len('"colour": "') + len('"sizes": [')
    assert got.finish_reason == "eos"
    assert got.token_sources["grammar"] >= forced
    assert got.metrics.steps <= len(got.token_ids) - forced


def merging_tokenizer() -> object:
    """Bytes, and the tokens "ab" and "abc"."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    vocabulary = {**tokenizer.get_vocab(), "ab": 260, "abc": 261}
    tokenizer.model = models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c")])
    return PlainTokenizer(tokenizer, {"eos_token": "</s>"}, None)


def test_the_end_of_forced_text_is_drafted_too() -> None:
    """The last token of forced text could reach beyond it: it is proposed, and said to be
    uncertain."""
    masks = Grammars(merging_tokenizer(), 262, lambda: {END}).masks(
        Grammar.regex("xab(cy|[0-9])"), 0
    )
    (x,) = ids_of("x")
    assert masks.forced([]) == ([x, 260], 1)
    allowed = allowed_by(masks, [x], [])
    assert allowed is not None
    assert bool(allowed[260])
    assert bool(allowed[261])


def test_the_drafter_learns_how_often_an_uncertain_token_comes() -> None:
    masks = Grammars(merging_tokenizer(), 262, lambda: {END}).masks(
        Grammar.regex("xab(cy|[0-9])"), 0
    )
    drafter = GrammarDrafter(masks)
    (x,) = ids_of("x")
    text = cast(Any, SimpleNamespace(tokens=[]))

    def chances() -> list[float]:
        """What it proposes, in a path, is [x, 260]; the chances that it gives these."""
        added: list[tuple[int, int, float]] = []
        adding = SimpleNamespace(add=lambda *candidate: added.append(candidate) or len(added))
        drafter.propose(text, cast(Any, adding))
        assert [candidate[:2] for candidate in added] == [(0, x), (1, 260)]
        return [candidate[2] for candidate in added]

    assert chances() == [1.0, 0.5]
    for tokens, (least, most) in (
        ([x], (0.5, 0.5)),
        ([x, 260, 7], (0.51, 0.99)),
        ([x, 261], (0.4, 0.51)),
    ):
        drafter.observe(text, Outcome(tokens, len(tokens), True))
        sure, uncertain = chances()
        assert sure == 1.0, tokens
        assert least <= uncertain <= most, tokens


def until_it_fails(masks: Masks) -> tuple[list[int], NoMask]:
    """A text of a's and b's up to where there is no mask."""
    history: list[int] = []
    with pytest.raises(NoMask) as caught:
        while True:
            allowed = allowed_by(masks, history, [])
            letter = ids_of("ab"[len(history) % 3 == 0])
            assert allowed is not None, history
            assert bool(allowed[letter[0]]), history
            history += letter
    return history, caught.value


def test_limits_that_are_reached_spoil_no_other_text() -> None:
    """What is compiled for a text that fails is not used for the next one, and the text that fails
    gets no mask of another place."""
    grammars = Grammars(tiny_tokenizer(), 270, lambda: {END})
    masks, other = (grammars.masks(Grammar.regex(GROWING), 0) for _ in range(2))
    allowed_by(other, ids_of("aab"), [])
    history, error = until_it_fails(masks)
    with pytest.raises(NoMask) as caught:  # it shares what is spoilt: no fault of ours
        allowed_by(other, ids_of("aabaab"), [])
    assert caught.value.args[1] != LEFT
    for place in (history, [*history, *ids_of("a")]):
        with pytest.raises(NoMask, match=re.escape(str(error))):
            masks.allowed(place, [])
        with pytest.raises(NoMask):
            masks.reach(place, ids_of("a"))
    again, same_error = until_it_fails(grammars.masks(Grammar.regex(GROWING), 0))
    assert again == history
    assert str(same_error) == str(error)
    assert len(history) > 9


def test_a_limit_that_is_near_changes_no_text(llm: LLM) -> None:
    """From some place on llguidance gives no mask, earlier where drafts have used its automata. The
    tokens before are the same with every strategy, and the grammar's limits are the reason."""
    grammar = Grammar.regex(GROWING)
    params = SamplingParams(temperature=2.0, min_p=0.0, seed=3, grammar=grammar)
    texts = list[list[int]]()
    for strategy, options in (("autoregressive", None), *RUNS):
        texts.append([])
        with pytest.raises(NoMask, match="too many expressions") as caught:
            for one in llm.stream("abc", 60, strategy, options, params):
                texts[-1] += one.token_ids
        assert caught.value.args[1] != LEFT, strategy
    plain = texts[0]
    for tokens in texts:
        assert len(tokens) > 9
        assert tokens == plain[: len(tokens)]


def test_a_text_that_is_cut_is_said_to_be(llm: LLM) -> None:
    """A beginning of a valid text has the finish reason "length", and only a valid one "eos"."""
    reasons = dict[str, int]()
    for new in range(1, 9):
        out = llm.generate("a", new, grammar=Grammar.regex("abc(de)?f"), seed=1)
        is_valid = re.fullmatch("abc(de)?f", out.text) is not None
        assert is_valid or out.finish_reason == "length", (new, out.text)
        reasons[out.finish_reason] = reasons.get(out.finish_reason, 0) + 1
    assert reasons["eos"] > 0
    assert reasons["length"] >= 4


def test_numbers_end_with_every_strategy(llm: LLM) -> None:
    """Drafts do not change where a number has to end."""
    schema = Grammar.json_schema({"type": "array", "items": {"type": "number"}, "minItems": 3})
    digits = {token: 90.0 for token in ids_of("1234567890")}
    params = replace(GREEDY, grammar=schema, logit_bias=digits)
    plain = llm.generate("abc", 90, "autoregressive", sampling=params)
    assert re.match(r"\[-?\d{20}, -?\d{20}, ", plain.text), plain.text
    for strategy, options in RUNS:
        assert same(plain, llm.generate("abc", 90, strategy, options, params)), strategy


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("auto", {"draft": "hidden"}),
        ("tokenswift", {"tree": (2, 2), "ngrams": 6, "draft": "hidden"}),
    ],
)
def test_drafts_stay_in_the_grammar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, strategy: str, options: dict[str, Any]
) -> None:
    """Whatever proposes, n-grams of the prompt among it, nothing that cannot come is verified."""
    grammar = Grammar.regex("xabab(ab){0,9}[0-9]{9}")
    prompt = "xabab! xabab! xabab! "
    masks = Grammars(tiny_tokenizer(), 260, lambda: {END}).masks(grammar, len(llm.encode(prompt)))
    out = [0]
    verified = [0]

    def accept(tree: DraftTree, logits: Any, history: list[int], *args: Any, **more: Any) -> Any:
        for node in range(1, len(tree)):
            path = [tree.tokens[each] for each in tree.path(node)]
            assert masks.reach(history, path) == len(path)
            verified[0] += 1
        return accept_exact(tree, logits, history, *args, **more)

    def forbidden(self: Candidates, *candidates: Any) -> set[int]:
        out[0] += len(nodes := forbidden_nodes(self, *candidates))
        return nodes

    forbidden_nodes = Candidates.forbidden
    monkeypatch.setattr(acceptance, "accept_exact", accept)
    monkeypatch.setattr(Candidates, "forbidden", forbidden)
    llm.generate(prompt, 60, strategy, options, replace(SEEDED, grammar=grammar))
    assert out[0] > 3
    assert verified[0] > 3


def test_a_text_that_leaves_its_grammar_is_a_failure() -> None:
    masks = masks_of(GRAMMARS["choice"])
    with pytest.raises(NoMask, match="no mask for position 1 "):
        masks.allowed(ids_of("yo"), [])
    assert issubclass(NoMask, RunError)


def test_response_formats_are_grammars(llm: LLM) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    same_one = llm.generate("abc", 90, grammar=GRAMMARS["schema"], seed=2)
    for response_format in (wanted, {"type": "json_schema", "schema": SCHEMA}, GRAMMARS["schema"]):
        assert (
            llm.generate("abc", 90, response_format=response_format, seed=2).token_ids
            == same_one.token_ids
        )
    free = llm.generate("abc", 20, seed=2)
    assert (
        llm.generate("abc", 20, seed=2, response_format={"type": "text"}).token_ids
        == free.token_ids
    )
    assert llm.generate("abc", 9, response_format={"type": "json_object"}).text.startswith("{")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_the_default_model(params: SamplingParams) -> None:
    """Tokens of several bytes, so that the tokenizer's own way to write forced text matters."""
    llm = default_llm()
    for name, grammar in GRAMMARS.items():
        params = replace(params, grammar=grammar)
        plain = llm.generate("Answer: ", 120, "autoregressive", sampling=params)
        for strategy, options in (*RUNS, ("medusa", {"tree": (3, 2, 2)})):
            assert same(plain, llm.generate("Answer: ", 120, strategy, options, params)), (
                name,
                strategy,
            )
