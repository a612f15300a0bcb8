"""Free drafters: reuse of the text so far, and text that a grammar forces.

*Prompt lookup* (Saxena 2023), for adaptive drafting: where the newest tokens have occurred before,
draft what followed them, up to 32 tokens. Besides the length of the match, these features give each
token's chance:

- whether other occurrences of the same tokens continue alike;
- whether the copied token was *new* in its place, that is not predicted by a match itself (a line
  number, a name in a table), and so is likely to differ again, and how many of the tokens before it
  were;
- how often copies were right lately.

A wrong token does not end a match: it is followed further, until a better one is found. A copy ends
where the text would: what comes after a question or an answer is not drafted.

*N-grams* are the paper's token reutilisation (section 3.2): a table maps a token to the tokens that
followed it, the most frequent first. An n-gram is counted once it is older than the penalty window:
a younger one would be penalised and rejected.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable

import torch

from tokenswift.memory import Need
from tokenswift.sampling.masks import Masks
from tokenswift.sampling.noise import gumbels_of
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.calibration import Regression
from tokenswift.speculation.drafters.base import Candidates, Drafter, Outcome
from tokenswift.speculation.sequence_state import SequenceState

LENGTH = 4  # n of the n-grams that are drafted
LEAST = 3  # length of a match at least
MOST = 32  # length of a match that is compared, and of a draft, at most
_MAX_PLACES = 4  # occurrences remembered of the same LEAST tokens, the newest ones
_BEHIND = 0.12  # counts as a matching token where a match goes on behind a wrong one
_NEAR = 4  # tokens before a copied one of which the share of new ones counts
_MEMORY = 0.9  # weight of the past in the running share of right predictions
_COUNT = 40  # the bits below hold the position, so that integers compare by count, then by position

Followers = tuple[int, ...]


class PromptLookup(Drafter):
    """Drafts what followed the longest earlier match of the newest tokens; free.

    Args:
        penalised: whether the sampler penalises repetition, which makes copies less likely.
    """

    name, source = "lookup", "ngram"

    def __init__(self, penalised: bool) -> None:
        self._text: list[int] = []
        self._new: list[bool] = []  # for each token, whether no match predicted it
        self._places: dict[tuple[int, ...], list[int]] = {}
        # features: 1, log of the length, running share, new, votes of the other occurrences, share
        # of new tokens before; fitted to what a 1.5B model wrote
        self._chance = Regression((-3.9 if penalised else -2.4, 1.0, 1.4, -1.6, 1.85, 1.35)).chance
        self._recent = 0.0  # running share of right predictions
        self._follow = -1  # place of the token that the followed match predicts next; -1: none
        self._agreed = 0  # right predictions in a row of the followed match
        self._drafted: list[int] = []  # the last prediction

    def begin(self, sequence: SequenceState) -> None:
        """Index the prompt."""
        self._extend(sequence.tokens)

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Add the predicted tokens as one path, as far as they may be worth a row."""
        text, end, self._drafted = self._text, len(self._text), []
        alike, length = self._matches()
        if not alike:
            if self._follow < 0:
                return
            alike, length = [self._follow], self._agreed + _BEHIND
        best, node, path_chance = alike[0], 0, 1.0
        for i in range(MOST):
            place = best + i % (
                end - best
            )  # past the text's end it continues from the match: a loop
            token = text[place]
            reach = [other for other in alike if other + i < end]
            alike = [other for other in reach if text[other + i] == token]
            votes = (2 * len(alike) / len(reach) - 1) * math.log(1 + len(reach)) if reach else 0.0
            near = sum(self._new[max(0, place - _NEAR) : place]) / _NEAR
            x = (1.0, math.log(length + i), self._recent, float(self._new[place]), votes, near)
            chance = self._chance(x)
            path_chance *= chance
            self._drafted.append(token)
            if path_chance < candidates.min_chance or token in sequence.eos:
                break
            node = candidates.add(node, token, chance)

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Count what was right of the last prediction, up to a wrong token, and index the new
        tokens."""
        for token, drafted in zip(outcome.tokens, self._drafted, strict=False):
            hit = token == drafted
            self._recent = _MEMORY * self._recent + (1 - _MEMORY) * hit
            if not hit:
                break
        self._drafted = []
        self._extend(outcome.tokens)

    def _extend(self, tokens: list[int]) -> None:
        """Append tokens to the text and index them; follow the match."""
        text, places = self._text, self._places
        for token in tokens:
            hit = self._follow >= 0 and text[self._follow] == token
            self._new.append(not hit)
            text.append(token)
            if self._follow >= 0:
                self._follow += 1
                self._agreed = self._agreed + 1 if hit else 0
            known = places.setdefault(tuple(text[-LEAST:]), [])
            if known and self._agreed < LEAST:
                self._follow, self._agreed = known[-1], LEAST
            known.append(len(text))
            if len(known) > _MAX_PLACES:
                del known[0]

    def _matches(self) -> tuple[list[int], int]:
        """Places after earlier occurrences of the newest tokens, the longest match first; and its
        length."""
        text, matches = self._text, []
        for place in self._places.get(tuple(text[-LEAST:]), ())[
            :-1
        ]:  # the last one is the text's end
            agreed = LEAST
            while (
                agreed < MOST and agreed < place and text[place - 1 - agreed] == text[-1 - agreed]
            ):
                agreed += 1
            matches.append((agreed, place))
        matches.sort(reverse=True)
        return [place for _, place in matches], matches[0][0] if matches else 0


class NgramTable:
    """Counts of the n-grams of a growing text, by first token.

    Args:
        delay: an n-gram is counted once this many tokens follow it, at least 0.
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
    """The paper's n-gram branches, below the likeliest next token; free.

    Args:
        count: branches in a step (k).
        min_count: only n-grams that occurred this often are drafted.
        sampler: the target's choice rule.
        coupled: choose among frequent n-grams with the target's noise.
    """

    name, source = "ngrams", "ngram"

    def __init__(self, count: int, min_count: int, sampler: Sampler, coupled: bool) -> None:
        self.count, self.min_count, self.sampler = count, min_count, sampler
        # with coupled drafting, the noise chooses from more n-grams than are drafted
        self.pool = count * (4 if coupled and not sampler.params.greedy else 1)
        self.table = NgramTable(delay=sampler.params.window)

    def begin(self, sequence: SequenceState) -> None:
        """Count the prompt's n-grams."""
        self.table.extend(sequence.tokens)

    def needs(self, text: int, row: int) -> list[Need]:
        """Memory of the branches' rows."""
        return [Need("ngrams", self.count, self.count * LENGTH * row)]

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Add the best n-grams as branches."""
        tree, start = candidates.tree, candidates.ngram_start
        for followers in self._branches(sequence, tree.tokens[start], tree.depths[start]):
            tree.add_path(followers, parent=start)

    def _branches(self, sequence: SequenceState, start: int, depth: int) -> list[Followers]:
        """The best n-grams that start with the token ``start``, at ``depth`` below the root."""
        entries = [
            entry for entry in self.table.lookup(start, self.pool) if entry[1] >= self.min_count
        ]
        if len(entries) <= self.count:
            return [followers for followers, _ in entries]
        grams = torch.tensor([followers for followers, _ in entries])
        score = torch.tensor([math.log(count) for _, count in entries])
        for i in range(grams.shape[1]):
            place = len(sequence.tokens) + depth + i
            score = score + gumbels_of(self.sampler.params.seed, place, grams[:, i])
        best = score.topk(self.count).indices.tolist()
        return [entries[i][0] for i in best]

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Count the new n-grams."""
        self.table.extend(outcome.tokens)


# ---- text forced by a grammar --------------------------------------------------------------------


FORCED = 31  # tokens drafted in a step, at most
_FIRST, _SLOW = 0.5, 1 / 16  # chance of an uncertain token at first, and the weight of each outcome


class GrammarDrafter(Drafter):
    """Drafts the text that the grammar forces; free. Where that text could be written in other
    tokens, the tokenizer's own are drafted, and count as uncertain.

    Args:
        masks: the sequence's grammar masks.
    """

    name = source = "grammar"

    def __init__(self, masks: Masks) -> None:
        self.masks = masks
        self._chance = _FIRST
        self._open: tuple[int, int] | None = None  # index and id of the first uncertain token

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Add the forced tokens as one path."""
        tokens, sure = self.masks.forced(sequence.tokens)
        self._open = (sure, tokens[sure]) if sure < len(tokens) else None
        node = 0
        for place, token in enumerate(tokens[:FORCED]):
            node = candidates.add(node, token, 1.0 if place < sure else self._chance)

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Learn how often an uncertain token is right."""
        if self._open is not None and self._open[0] < len(outcome.tokens):
            place, token = self._open
            self._chance += _SLOW * ((outcome.tokens[place] == token) - self._chance)
        self._open = None
