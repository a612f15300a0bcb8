"""Reuse of the text so far: what followed before is offered again.

*Prompt lookup* (Saxena 2023) is for adaptive drafting: where the newest tokens have stood before, the text
may go on as it did then, for up to 32 tokens and with a chance for each. Three things say how likely a copied
token is, beside the length of the match:

- whether the other earlier places of the same tokens go on alike;
- whether the token was *new* where it is copied from: no match had predicted it then (the number of a line,
  the name in a table), so it is likely to differ again;
- how often copies were right of late.

A token that differs does not end a match: one that has been followed so far is followed on behind it, until
three tokens in a row differ or a better one is found.

*N-grams* are the paper's token reutilisation (section 3.2): a table maps a token to the tokens that followed
it, the most frequent first. An n-gram enters only once all of it is older than the penalty window: a younger
one would be penalised and rejected.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable

import torch

from tokenswift.memory import Need
from tokenswift.sampling.choice import Sampler, gumbels_of
from tokenswift.sampling.masks import Masks
from tokenswift.spec.control import Regression
from tokenswift.spec.drafters.base import Candidates, Drafter, Outcome
from tokenswift.spec.strategy import SequenceState

LENGTH = 4  # n of the n-grams that are drafted
LEAST = 3  # tokens of a match that must agree
MOST = 32  # tokens compared, and tokens drafted, by a match
_PLACES = 4  # newest places kept for each beginning
_ASTRAY = 3  # tokens in a row that differ, and the match is given up
_RATE = 0.2  # one prediction a step at most: learn fast
_MEMORY = 0.9  # of the running share of right predictions
_COUNT = 40  # the bits below hold the position, so that integers compare by count, then by position

Followers = tuple[int, ...]


class PromptLookup(Drafter):
    """What followed the longest earlier match of the text's end, in every step, for nothing.

    Args:
        penalised: the sampler penalises repetition, which makes repeating less likely.
    """

    name, source = "lookup", "ngram"

    def __init__(self, penalised: bool) -> None:
        self._text: list[int] = []
        self._new: list[bool] = []  # of each token: no match predicted it
        self._places: dict[tuple[int, ...], list[int]] = {}
        # features: 1, log of the length, running share, new then, votes of the other places, goes on behind
        # a token that differed
        weights = (-3.0 if penalised else -1.5, 1.0, 1.5, -2.0, 1.0, -0.3)
        self._chance = Regression(weights, _RATE)
        self._recent = 0.0  # running share of right predictions
        self._follow = -1  # place of the token that the match followed now expects next; -1 without one
        self._agreed = self._differed = 0  # newest tokens that the followed match predicted, or did not
        self._drafted: list[tuple[int, tuple[float, ...], float]] = []  # token, features, chance

    def begin(self, sequence: SequenceState) -> None:
        """Read the prompt."""
        self._extend(sequence.tokens)

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """One path."""
        node = 0
        for token, chance in self._predict():
            node = candidates.add(node, token, chance)

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Compare the last prediction with what came, up to the first token that differs; read on."""
        for token, (drafted, x, chance) in zip(outcome.tokens, self._drafted, strict=False):
            hit = token == drafted
            self._chance.learn(x, hit - chance)
            self._recent = _MEMORY * self._recent + (1 - _MEMORY) * hit
            if not hit:
                break
        self._drafted = []
        self._extend(outcome.tokens)

    def _extend(self, tokens: list[int]) -> None:
        """Append tokens to the text."""
        text, places = self._text, self._places
        for token in tokens:
            hit = self._follow >= 0 and text[self._follow] == token
            self._new.append(not hit)
            text.append(token)
            if self._follow >= 0:
                self._follow += 1
                self._agreed, self._differed = (self._agreed + 1, 0) if hit else (0, self._differed + 1)
                if self._differed == _ASTRAY:
                    self._follow = -1
            if len(text) < LEAST:
                continue
            known = places.setdefault(tuple(text[-LEAST:]), [])
            if known and (self._follow < 0 or self._agreed < LEAST):
                self._follow, self._agreed, self._differed = known[-1], LEAST, 0
            known.append(len(text))
            if len(known) > _PLACES:
                del known[0]

    def _predict(self) -> list[tuple[int, float]]:
        """Tokens that may follow, each with its chance given the one before; empty without a match."""
        self._drafted = []
        text, end = self._text, len(self._text)
        alike, length = self._matches()
        behind = 0.0
        if not alike:
            if self._follow < 0:
                return []
            alike, length, behind = [self._follow], self._agreed + 1, 1.0
        best = alike[0]
        for i in range(MOST):
            place = best + i % (end - best)  # the match may reach into its own continuation: a loop
            token = text[place]
            reach = [other for other in alike if other + i < end]
            alike = [other for other in reach if text[other + i] == token]
            votes = (2 * len(alike) / len(reach) - 1) * math.log(1 + len(reach)) if reach else 0.0
            x = (1.0, math.log(length + i), self._recent, float(self._new[place]), votes, behind)
            self._drafted.append((token, x, self._chance.chance(x)))
        return [(token, chance) for token, _, chance in self._drafted]

    def _matches(self) -> tuple[list[int], int]:
        """Places behind earlier occurrences of the newest tokens, longest match first, and its length."""
        text, end = self._text, len(self._text)
        found = []
        for place in self._places.get(tuple(text[-LEAST:]), ()):
            if place == end:
                continue
            agreed = LEAST
            while agreed < MOST and agreed < place and text[place - 1 - agreed] == text[-1 - agreed]:
                agreed += 1
            found.append((agreed, place))
        found.sort(reverse=True)
        return [place for _, place in found], found[0][0] if found else 0


class NgramTable:
    """Counts of the n-grams of a growing text, by first token.

    Args:
        delay: at least 0; an n-gram enters once all its tokens are older than this many newest ones.
        length: n of the n-grams, at least 2: the first token and ``length - 1`` followers.
    """

    def __init__(self, delay: int, length: int = LENGTH) -> None:
        self.delay, self.length = delay, length
        self._tokens: list[int] = []
        self._counted = 0  # n-grams that start before this position
        #: first token → followers → count and latest position in one integer
        self._counts: defaultdict[int, dict[Followers, int]] = defaultdict(dict)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text, ready = self._tokens, self._counted
        text.extend(tokens)
        self._counted = max(ready, len(text) - self.delay - self.length + 1)
        for at in range(ready, self._counted):
            counts, followers = self._counts[text[at]], tuple(text[at + 1 : at + self.length])
            counts[followers] = (1 + (counts.get(followers, 0) >> _COUNT) << _COUNT) + at

    def lookup(self, token: int, k: int) -> list[tuple[Followers, int]]:
        """Up to k n-grams that start with ``token``: (followers, count), the most frequent first.

        Among equal counts the one that occurred last comes first.
        """
        counts = self._counts.get(token, {})
        best = heapq.nlargest(k, counts, key=counts.__getitem__)
        return [(followers, counts[followers] >> _COUNT) for followers in best]


class Ngrams(Drafter):
    """The paper's n-gram branches, behind the token that is likeliest to follow.

    Args:
        count: branches a step (k).
        least: n-grams are drafted that were seen this often.
        sampler: the target's choice rule.
        coupled: choose among frequent n-grams with the target's noise.
    """

    name, source = "ngrams", "ngram"

    def __init__(self, count: int, least: int, sampler: Sampler, coupled: bool) -> None:
        self.count, self.least, self.sampler = count, least, sampler
        # coupled branches are chosen by the noise, from more than are drafted
        self.pool = count * (4 if coupled and not sampler.params.greedy else 1)
        self.table = NgramTable(delay=sampler.params.window)

    def begin(self, sequence: SequenceState) -> None:
        """Read the prompt."""
        self.table.extend(sequence.tokens)

    def needs(self, text: int, row: int) -> list[Need]:
        """The branches' rows."""
        return [Need("ngrams", self.count, self.count * LENGTH * row)]

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """The best branches."""
        tree, start = candidates.tree, candidates.ngram_start
        for followers in self._branches(sequence, tree.tokens[start], tree.depths[start]):
            tree.add_path(followers, parent=start)

    def _branches(self, sequence: SequenceState, start: int, depth: int) -> list[Followers]:
        """The best n-grams after the token ``start``, which stands ``depth`` places after the root."""
        found = [entry for entry in self.table.lookup(start, self.pool) if entry[1] >= self.least]
        if len(found) <= self.count:
            return [followers for followers, _ in found]
        grams = torch.tensor([followers for followers, _ in found])
        score = torch.tensor([math.log(count) for _, count in found])
        for i in range(grams.shape[1]):
            place = len(sequence.tokens) + depth + i
            score = score + gumbels_of(self.sampler.params.seed, place, grams[:, i])
        best = score.topk(self.count).indices.tolist()
        return [found[i][0] for i in best]

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Read on."""
        self.table.extend(outcome.tokens)


# ---- what a grammar forces ---------------------------------------------------------------------------------


FORCED = 31  # tokens drafted in a step
_FIRST, _SLOW = 0.5, 1 / 16  # chance of a token that is not certain, and the weight of a new one


class GrammarDrafter(Drafter):
    """The forced text, in every step, for the price of its rows. Where it could be written in other tokens,
    and its last token could reach beyond it, the tokenizer's own are proposed.

    Args:
        masks: of the text.
    """

    name = source = "grammar"

    def __init__(self, masks: Masks) -> None:
        self.masks = masks
        self._chance = _FIRST
        self._open: tuple[int, int] | None = None  # place in the step, and token, of the first uncertain one

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """One path."""
        tokens, sure = self.masks.forced(sequence.tokens)
        self._open = (sure, tokens[sure]) if sure < len(tokens) else None
        node = 0
        for place, token in enumerate(tokens[:FORCED]):
            node = candidates.add(node, token, 1.0 if place < sure else self._chance)

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Learn how often a token came that was not certain."""
        if self._open is not None and self._open[0] < len(outcome.tokens):
            place, token = self._open
            self._chance += _SLOW * ((outcome.tokens[place] == token) - self._chance)
        self._open = None
