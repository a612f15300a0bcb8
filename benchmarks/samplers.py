"""How long text holds out by how it is sampled: loops, distinct n-grams, perplexity, words of a dictionary.

The texts of all prompts and seeds of a setting are written as one batch, with plain decoding: what drafts
changes no token. A length's figures are those of the texts' beginnings of that length.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from math import exp
from statistics import mean, median
from typing import Any

import torch

from benchmarks.common import PLAIN, Trial
from tokenswift.engine.llm import LLM
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.metrics import distinct
from tokenswift.runs.loop import LoopGuard

WINDOW = 1024  # tokens over which perplexity is taken
READ = 128  # rows of a pass that reads a text again
PHASES = ("verify", "choose", "commit", "observe")
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def measure(trial: Trial) -> dict[str, Any]:
    """Figures of texts at each of the row's points."""
    llm, config = trial.llm, trial.config
    begun = [trial.prompt(index=index) for index in range(config["novels"])]
    texts = [one for one in begun for _ in range(config["draws"])]
    samplings = [replace(trial.params, seed=trial.params.seed + i) for i in range(len(texts))]
    with Scheduler(llm, len(texts)) as scheduler:
        tickets = [
            scheduler.submit(Request(one.ids, trial.new, PLAIN, None, sampling, ignore_eos=True))
            for one, sampling in zip(texts, samplings, strict=True)
        ]
        for ticket in tickets:
            ticket.wait()
    results = [ticket.result for ticket in tickets]
    known = dictionary(llm)
    losses = [_losses(llm, one.ids, found.token_ids) for one, found in zip(texts, results, strict=True)]
    figures = {}
    for point in config["points"]:
        parts = [found.token_ids[:point] for found in results]
        loops = [at for part in parts if (at := loop_of(part)) is not None]
        last = [mean(loss[max(0, point - WINDOW) : point]) for loss in losses]
        figures[str(point)] = {
            "loops": len(loops) / len(parts),
            **({"loop_at": median(loops)} if loops else {}),
            **{f"d{n}": mean(distinct(part, n) for part in parts) for n in (1, 2, 3, 4)},
            "perplexity": exp(mean(mean(loss[:point]) for loss in losses)),
            "last_perplexity": exp(mean(last)),
            "last_perplexity_most": exp(max(last)),
            "words": mean(share_of_words(llm.source.codec.decode(part), known) for part in parts),
        }
    seconds = {phase: sum(found.metrics.phases.get(phase, 0.0) for found in results) for phase in PHASES}
    seconds["verify"] /= len(results)  # a pass counts for every text in it
    figures[str(trial.new)]["choose_share"] = seconds["choose"] / sum(seconds.values())
    rounded = {at: {k: round(v, 4) for k, v in found.items()} for at, found in figures.items()}
    names = ", ".join(one.name for one in begun)
    windows = [
        round(exp(mean(mean(loss[at : at + WINDOW]) for loss in losses)), 3)
        for at in range(0, trial.new - WINDOW + 1, WINDOW)
    ]
    return {
        "prompt": {"name": names, "tokens": config["prefill"]},
        "windows": windows,
        "ends": [found.text[-200:] for found in results],
        "figures": rounded,
    }


def loop_of(tokens: list[int]) -> int | None:
    """Where the first loop begins that the loop guard sees."""
    guard = LoopGuard()
    for token in tokens:
        guard.push(token)
        if guard.loop is not None:
            return guard.loop.start
    return None


def dictionary(llm: LLM) -> set[str]:
    """Words: the tokens of the vocabulary that are a word after a space, in small letters."""
    codec, found = llm.source.codec, set[str]()
    for token in sorted(set(codec.get_vocab().values())):
        text = codec.decode([token])
        if text.startswith(" ") and WORD.fullmatch(text[1:].lower()):
            found.add(text[1:].lower())
    return found


def share_of_words(text: str, known: set[str]) -> float:
    """How many of a text's words are in a dictionary."""
    words = WORD.findall(text.lower())
    return sum(word in known for word in words) / len(words) if words else 0.0


def _losses(llm: LLM, prompt: list[int], tokens: list[int]) -> list[float]:
    """-log p of each new token by the model alone: no penalty, no filter, temperature 1."""
    target, ids = llm.target, [*prompt, *tokens]
    cache, losses = target.new_cache(len(ids)), list[float]()
    if len(prompt) > 1:
        target.prefill(prompt[:-1], cache)
    for start, end in pairwise([*range(len(prompt) - 1, len(ids) - 1, READ), len(ids) - 1]):
        rows = torch.tensor(ids[start:end])
        hidden = target.forward(rows, torch.arange(start, end), cache).hidden
        cache.commit(tuple(range(end - start)))
        shares = target.logits(hidden).double().log_softmax(-1)
        after = torch.tensor(ids[start + 1 : end + 1], device=shares.device)
        losses += (-shares.gather(1, after[:, None])[:, 0]).tolist()
    return losses
