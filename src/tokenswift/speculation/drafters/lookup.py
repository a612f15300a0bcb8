"""Free drafters: reuse of the text so far, and text that a grammar forces.

*Prompt lookup* (Saxena 2023), for adaptive drafting: where the newest tokens have occurred before,
draft what followed them, up to 32 tokens. Besides the length of the match, these features give each
token's chance:

- whether other occurrences of the same tokens continue alike;
- whether the copied token was *new* in its place, that is not predicted by a match itself (a line
  number, a name in a table), and so is likely to differ again, and how many of the tokens before it
  were;
- how often copies were right lately;
- where the sampler penalises repetitions by their length (DRY), how often copies of that length
  went on lately.

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
from typing import NamedTuple

import torch

from tokenswift.memory import Need
from tokenswift.sampling.masks import Masks
from tokenswift.sampling.noise import gumbels_of
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.calibration import Regression
from tokenswift.speculation.drafters import occurrences
from tokenswift.speculation.drafters.base import Candidates, Drafter, Outcome
from tokenswift.speculation.drafters.occurrences import Occurrences
from tokenswift.speculation.sequence_state import SequenceState

LENGTH = 4  # n of the n-grams that are drafted, as in the paper
# Each of these stands with what half of it and twice as much, or the values named, do to tokens a
# unit of time: the mean over four texts of 160 tokens of the default model at a fixed price of rows
# (`tools/drafter_constants.py`), in which ±1% is noise. The weights below were fitted with them.
MOST = 32  # length of a match that is compared, and of a draft, at most: +.6, 0%
# counts as a matching token where a match goes on behind a wrong one: +.1, 0%
_BEHIND = 0.12
_NEAR = 4  # tokens before a copied one of which the share of new ones counts: -.4, +.9%
# weight of the past in the running share of right predictions: .8 +1.0%, .95 +.4%
_MEMORY = 0.9
_COUNT = 40  # the bits below hold the position, so that integers compare by count, then by position

Followers = tuple[int, ...]


class CopyWeights(NamedTuple):
    """Weights, in this order, of what tells how likely a copied token is right.

    Attributes:
        constant: weight of 1.
        log_length: logarithm of the length of the match, up to the token.
        recent: running share of right predictions.
        is_new: whether the token was new in its place.
        votes: of the other occurrences, see :func:`_votes`.
        new_before: share of new ones among the tokens before it.
    """

    constant: float
    log_length: float
    recent: float
    is_new: float
    votes: float
    new_before: float


#: fitted to 260 answers of a 1.5B model (docs/decisions.md)
_WEIGHTS = CopyWeights(
    constant=-2.4,
    log_length=1.0,
    recent=1.4,
    is_new=-1.6,
    votes=1.85,
    new_before=1.35,
)
_PENALISED_WEIGHTS = _WEIGHTS._replace(constant=-3.9)
# Under DRY, right copies ÷ those that were expected to be right, by the tokens beyond the allowed
# length that they repeat (0, 1, …): 20,000 tokens of a novel by a 1.5B model, with the sampling of
# continued text. There a copy of 4 tokens goes on in 48 of 100 places, of 6 in 19, of 7 in 5.
_WENT_ON = (1.0, 1.0, 0.9, 0.75, 0.3, 0.1)
_SEEN = 4.0  # expected copies that these count as
_FADING = 0.99  # weight of the past in what is counted


class DryLengths:
    """How often copies go on where DRY penalises long repetitions, by their length.

    Args:
        allowed: length of repetitions that are not penalised.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self._expected = [_SEEN] * len(_WENT_ON)
        self._right = [_SEEN * share for share in _WENT_ON]

    def _class(self, length: float) -> int:
        return max(0, min(int(length) - self.allowed, len(_WENT_ON) - 1))

    def share(self, length: float) -> float:
        """Right copies ÷ expected ones, at most 1, of copies behind so many repeated tokens."""
        number = self._class(length)
        return min(1.0, self._right[number] / self._expected[number])

    def learn(self, length: float, expected: float, hit: bool) -> None:
        """Count a copy that was expected to be right with a chance before :meth:`share`."""
        number = self._class(length)
        self._expected[number] = _FADING * self._expected[number] + expected
        self._right[number] = _FADING * self._right[number] + hit


class Copied(NamedTuple):
    """A drafted copy.

    Attributes:
        token: its id.
        length: tokens of the match before it.
        chance: that it is right, whatever DRY makes of it.
    """

    token: int
    length: float
    chance: float


class PromptLookup(Drafter):
    """Drafts what followed the longest earlier match of the newest tokens; free.

    Args:
        penalised: whether the sampler penalises repetition, which makes copies less likely.
        allowed_length: of repetitions, where the sampler penalises longer ones (DRY); None: it does
            not.

    Attributes:
        occurrences: of the text.
    """

    name = "lookup"
    source = "ngram"

    def __init__(self, penalised: bool, allowed_length: int | None = None) -> None:
        self.occurrences = Occurrences()
        self._new: list[bool] = []  # for each token, whether no match predicted it
        self._chance = Regression(_PENALISED_WEIGHTS if penalised else _WEIGHTS).chance
        self._recent = 0.0  # running share of right predictions
        self._follow = -1  # place of the token that the followed match predicts next; -1: none
        self._agreed = 0  # right predictions in a row of the followed match
        self._drafted: list[Copied] = []  # the last prediction
        self._lengths = None if allowed_length is None else DryLengths(allowed_length)

    def begin(self, sequence: SequenceState) -> None:
        """Index the prompt."""
        self._extend(sequence.tokens)

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Add the predicted tokens as one path, as far as they may be worth a row."""
        self._drafted = []
        places, length = self._matches()
        if not places and self._follow >= 0:
            places = [self._follow]
            length = self._agreed + _BEHIND
        if not places:
            return
        text = self.occurrences.text
        end = len(text)
        best = places[0]
        node = 0
        path_chance = 1.0
        for ahead in range(MOST):
            place = best + ahead % (end - best)  # past the text's end the match begins anew: a loop
            token = text[place]
            reaching = [other for other in places if other + ahead < end]
            places = [other for other in reaching if text[other + ahead] == token]
            log_length = math.log(length + ahead)
            is_new = float(self._new[place])
            votes = _votes(len(places), len(reaching))
            new_before = sum(self._new[max(0, place - _NEAR) : place]) / _NEAR
            chance = self._chance((1.0, log_length, self._recent, is_new, votes, new_before))
            self._drafted.append(Copied(token, length + ahead, chance))
            if self._lengths is not None:
                chance *= self._lengths.share(length + ahead)
            path_chance *= chance
            if path_chance < candidates.min_chance or token in sequence.eos:
                break
            node = candidates.add(node, token, chance)

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Count what was right of the last prediction, up to a wrong token, and index the new
        tokens."""
        for token, copied in zip(outcome.tokens, self._drafted, strict=False):
            hit = token == copied.token
            self._recent = _MEMORY * self._recent + (1 - _MEMORY) * hit
            if self._lengths is not None:
                self._lengths.learn(copied.length, copied.chance, hit)
            if not hit:
                break
        self._drafted = []
        self._extend(outcome.tokens)

    def _extend(self, tokens: list[int]) -> None:
        """Append tokens to the text and index them; follow the match."""
        text = self.occurrences.text
        for token in tokens:
            hit = self._follow >= 0 and text[self._follow] == token
            self._new.append(not hit)
            earlier = self.occurrences.append(token)
            if self._follow >= 0:
                self._follow += 1
                self._agreed = self._agreed + 1 if hit else 0
            if earlier is not None and self._agreed < occurrences.LEAST:
                self._follow = earlier
                self._agreed = occurrences.LEAST

    def _matches(self) -> tuple[list[int], int]:
        """Places after earlier occurrences of the newest tokens, the longest match first; and its
        length."""
        places = self.occurrences.before_end()
        matches = sorted(((self._match_length(place), place) for place in places), reverse=True)
        longest = matches[0][0] if matches else 0
        return [place for _, place in matches], longest

    def _match_length(self, place: int) -> int:
        """How many tokens before a place are the newest ones; the first few are known to be."""
        text = self.occurrences.text
        length = occurrences.LEAST
        while length < min(MOST, place) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        return length


def _votes(agreeing: int, reaching: int) -> float:
    """How clearly the matches that reach so far agree with the first: their majority, times the
    logarithm of their number; 0 where none reaches."""
    if not reaching:
        return 0.0
    return (2 * agreeing / reaching - 1) * math.log(1 + reaching)


class NgramTable:
    """Counts of the n-grams of a growing text, by first token.

    Args:
        delay: an n-gram is counted once this many tokens follow it, at least 0.
        length: n of the n-grams, at least 2: the first token and ``length - 1`` followers.
    """

    def __init__(self, delay: int, length: int = LENGTH) -> None:
        self.delay = delay
        self.length = length
        self._tokens: list[int] = []
        self._counted = 0  # n-grams that start before this position
        #: first token → followers → count and latest position in one integer
        self._counts: defaultdict[int, dict[Followers, int]] = defaultdict(dict)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text = self._tokens
        text.extend(tokens)
        ready = self._counted
        self._counted = max(ready, len(text) - self.delay - self.length + 1)
        for start in range(ready, self._counted):
            counts = self._counts[text[start]]
            followers = tuple(text[start + 1 : start + self.length])
            count = 1 + (counts.get(followers, 0) >> _COUNT)
            counts[followers] = (count << _COUNT) + start

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

    name = "ngrams"
    source = "ngram"

    def __init__(self, count: int, min_count: int, sampler: Sampler, coupled: bool) -> None:
        self.count = count
        self.min_count = min_count
        self.sampler = sampler
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
        tree = candidates.tree
        start = candidates.ngram_start
        for followers in self._branches(sequence, tree.tokens[start], tree.depths[start]):
            tree.add_path(followers, parent=start)

    def _branches(self, sequence: SequenceState, start: int, depth: int) -> list[Followers]:
        """The best n-grams that start with the token ``start``, at ``depth`` below the root."""
        frequent = self.table.lookup(start, self.pool)
        counts = {followers: count for followers, count in frequent if count >= self.min_count}
        branches = list(counts)
        if len(branches) <= self.count:
            return branches
        tokens = torch.tensor(branches)
        score = torch.tensor([math.log(count) for count in counts.values()])
        for i in range(tokens.shape[1]):
            position = len(sequence.tokens) + depth + i
            score = score + gumbels_of(self.sampler.params.seed, position, tokens[:, i])
        best = score.topk(self.count).indices.tolist()
        return [branches[i] for i in best]

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Count the new n-grams."""
        self.table.extend(outcome.tokens)


# ---- text forced by a grammar --------------------------------------------------------------------


FORCED = 31  # tokens drafted in a step, at most: all nodes of a tree of adaptive drafting
_FIRST = 0.5  # chance of an uncertain token at first: nothing is known of it
_SLOW = 1 / 16  # weight of each outcome in that chance, as in the means of `control`


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
        for index, token in enumerate(tokens[:FORCED]):
            node = candidates.add(node, token, 1.0 if index < sure else self._chance)

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Learn how often an uncertain token is right."""
        if self._open is not None and self._open[0] < len(outcome.tokens):
            index, token = self._open
            self._chance += _SLOW * ((outcome.tokens[index] == token) - self._chance)
        self._open = None
