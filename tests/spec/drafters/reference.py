"""The draft step once more, slow and plain, from its description alone: nothing of the library's is used but
the noise (which has tests of its own) and the heads' weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.spec.drafters.plain import Row, Seen, Text, logits, run
from tokenswift.config import SamplingParams
from tokenswift.sampling.noise import Noise

Candidate = tuple[int, int, int, str]  # token, parent, depth, source


class ChoiceRule:
    """The choice rule: processed scores plus the noise of the position."""

    def __init__(self, params: SamplingParams, vocab: int, coupled: bool) -> None:
        self.params, self.coupled = params, coupled and not params.greedy
        self.noise = Noise(params.seed, vocab)

    def best(self, row: Tensor, context: list[int | None], width: int) -> list[int]:
        """Up to ``width`` tokens for the place after the context, best first; None is an unknown token."""
        p = self.params
        scores = row.double().clone()
        if p.repetition_penalty != 1:
            for token in set(context[-p.penalty_window :]) - {None}:
                value = float(scores[token])
                scores[token] = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        if not p.greedy:
            scores = scores / p.temperature
            scores[scores < scores.max() + math.log(p.min_p or 1e-300)] = -math.inf
        if self.coupled:
            scores = scores + self.noise.at(len(context))
        order = scores.sort(descending=True)
        return [int(t) for t, s in zip(order.indices[:width], order.values, strict=False) if s > -math.inf]


class HeadStates:
    """The heads by their definitions, on single states (D,)."""

    def __init__(self, heads: Any, model: Any) -> None:
        self.kind, self.count = heads.config.kind, heads.config.count
        self.eps = heads.config.eps
        self.model = model
        self.weights: dict[str, Tensor] = heads.state_dict()

    def _norm(self, state: Tensor, weight: Tensor) -> Tensor:
        return weight * state / (state.pow(2).mean() + self.eps).sqrt()

    @torch.no_grad()
    def advance(self, i: int, previous: Tensor, base: Tensor, token: int) -> Tensor:
        """State of head i from that of the head before (the base's own for the first)."""
        w = {name.partition(".")[2]: tensor for name, tensor in self._layer(i).items()}
        if self.kind == "linear":
            return previous + w["linear.weight"] @ self._norm(previous, w["input_layernorm.weight"])
        if self.kind == "medusa":
            state, block = self._norm(base, w["final_norm.weight"]), 0
            while f"blocks.{block}.weight" in w:
                z = w[f"blocks.{block}.weight"] @ state + w[f"blocks.{block}.bias"]
                state, block = state + z / (1 + (-z).exp()), block + 1
            return state
        embed = self.model.model.embed_tokens.weight[token]
        first = w["first_norm.weight"] if i == 0 else w["state_norm.weight"]
        parts = [self._norm(previous, first), self._norm(base, w["base_norm.weight"])]
        x = torch.cat([*parts, self._norm(embed, w["embed_norm.weight"])])
        state = w["linear.weight"] @ x + w["linear.bias"]
        if "inner.weight" in w:
            state = state + w["outer.weight"] @ (w["inner.weight"] @ x + w["inner.bias"]).clamp_min(0)
        return state

    def _layer(self, i: int) -> dict[str, Tensor]:
        """Weights of head i; conditioned heads beyond the last step use it again."""
        own = f"layers.{i}." if f"layers.{i}.linear.weight" in self.weights else "layers.0."
        if self.kind == "medusa":
            own = f"layers.{i}."
        return {k.removeprefix("layers."): v for k, v in self.weights.items() if k.startswith(own)}

    @torch.no_grad()
    def logits(self, i: int, state: Tensor) -> Tensor:
        """The LM head on head i's state."""
        w = {name.partition(".")[2]: tensor for name, tensor in self._layer(i).items()}
        if self.kind == "linear":
            state = self._norm(state, w["post_layernorm.weight"])
        return (w["lm_head.weight"] if "lm_head.weight" in w else self.model.lm_head.weight) @ state


@dataclass
class Tree:
    """Candidates in the order in which they were proposed; a path that is there already is not doubled."""

    root: int
    nodes: list[Candidate] = field(default_factory=list)

    def add(self, parent: int, token: int, source: str) -> int:
        """The node of a candidate below a node (0 is the root)."""
        for number, (known, above, _, _) in enumerate(self.nodes, 1):
            if (known, above) == (token, parent):
                return number
        depth = self.nodes[parent - 1][2] + 1 if parent else 1
        self.nodes.append((token, parent, depth, source))
        return len(self.nodes)

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child to a node."""
        found: list[int] = []
        while node:
            token, node = self.nodes[node - 1][:2]
            found = [token, *found]
        return found


@dataclass
class Grower:
    """The heads' tree of given widths; the heads draft no token of ``never``."""

    model: Any
    heads: HeadStates | None
    rule: ChoiceRule
    widths: tuple[int, ...]
    never: list[int]

    def grow(self, tree: Tree, text: list[int], base: Tensor, backbone: bool) -> int:
        """Add the tree that starts from a hidden state (for ``backbone`` the root's own); returns γ."""
        heads = self.heads
        depth = min(len(self.widths), backbone + (heads.count if heads else 0))
        level: list[tuple[int, Tensor]] = [(0, base)]  # nodes, and the state that the head above left
        best: list[int | None] = []
        for number in range(depth):
            head, along = number - backbone, best
            below: list[tuple[int, Tensor]] = []
            for place, (node, state) in enumerate(level):
                path: list[int | None] = [*tree.path(node)]
                if heads is None or head < 0:
                    row = logits(self.model, base)
                else:
                    state = heads.advance(head, state, base, [text[-1], *tree.path(node)][-1])
                    row = heads.logits(head, state)
                    row[self.never] = -math.inf
                    if heads.kind != "conditioned":  # one ranking for the whole level, along the best path
                        path = along
                found = self.rule.best(row, [*text, *path], self.widths[number])
                if place == 0:
                    best = [*best, found[0]]
                below += [(tree.add(node, token, "head"), state) for token in found]
            level = below
        return depth


def branches(
    text: list[int], start: int, offset: int, ngrams: int, least: int, rule: ChoiceRule
) -> list[list[int]]:
    """Up to ``ngrams`` ways in which the text went on for three tokens after the token ``start``, which
    stands ``offset`` places after the root; only those older than the penalty window."""
    p = rule.params
    window = p.penalty_window if p.repetition_penalty != 1 else 0
    counts: Counter[tuple[int, ...]] = Counter()
    last: dict[tuple[int, ...], int] = {}
    for i in range(len(text) - window - 3):
        if text[i] == start:
            counts[tuple(text[i + 1 : i + 4])] += 1
            last[tuple(text[i + 1 : i + 4])] = i
    ranked = sorted(counts, key=lambda gram: (counts[gram], last[gram]), reverse=True)
    ranked = ranked[: ngrams * (4 if rule.coupled else 1)]
    ranked = [gram for gram in ranked if counts[gram] >= least]
    if len(ranked) > ngrams:
        noise = [rule.noise.at(len(text) + offset + i) for i in range(3)]

        def score(gram: tuple[int, ...]) -> float:
            return math.log(counts[gram]) + sum(float(n[t]) for n, t in zip(noise, gram, strict=True))

        ranked = sorted(ranked, key=score, reverse=True)[:ngrams]
    return [list(gram) for gram in ranked]


def important(text: Text, total: int, layer: int, head: int) -> list[float]:
    """Importance of the first ``total`` positions: the newest one's queries of the group, times the key."""
    queries = text.rows[total - 1].queries[layer]
    group = len(queries) // len(text.rows[0].keys[layer])
    mine = queries[head * group : (head + 1) * group]
    return (torch.stack([row.keys[layer][head] for row in text.rows[:total]]) @ mine.sum(0)).tolist()


def recent(text: Text, total: int, layer: int, head: int) -> list[float]:
    """StreamingLLM's: the newer the better."""
    return list(map(float, range(total)))


def snapkv(text: Text, total: int, layer: int, head: int) -> list[float]:
    """SnapKV's: attention of the newest 32 queries, averaged over 5 neighbours; those 32 stay in any case."""
    seen = min(32, total)
    mass = [0.0] * total
    for t in range(total - seen, total):
        queries = text.rows[t].queries[layer]
        group = len(queries) // len(text.rows[0].keys[layer])
        keys = torch.stack([row.keys[layer][head] for row in text.rows[: t + 1]])
        for q in queries[head * group : (head + 1) * group]:
            share = (keys @ q * q.shape[0] ** -0.5).softmax(0)
            mass[: t + 1] = [m + float(s) for m, s in zip(mass, share, strict=False)]
    near = [mass[max(0, t - 2) : t + 3] for t in range(total)]
    pooled = [sum(part) / len(part) for part in near]
    return [p if t < total - seen else 1e6 + t for t, p in enumerate(pooled)]


def single_chunks(text: Text, total: int, layer: int, head: int) -> list[float]:
    """TriForce's with chunks of one token: :func:`important`, but the newest token stays in any case."""
    return [*important(text, total, layer, head)[:-1], math.inf]


class Held:
    """Which positions a sparse cache holds, from scratch at every step: the sinks; the most important of the
    rest as of the last selection, as many as newer tokens have left; the newest since.

    Args:
        policy: gives a position's importance.
        refresh: select anew when newer tokens have taken all places; else once and for all.
        frozen: newer tokens take no places.
        every: with ``refresh``, select anew after so many tokens instead.
    """

    def __init__(
        self, policy: Any, budget: int, sinks: int, refresh: bool, frozen: bool = False, every: int = 0
    ) -> None:
        self.policy, self.budget, self.sinks = policy, budget, sinks
        self.refresh, self.frozen, self.every = refresh, frozen, every
        self.selected = 0  # length of the text at the last selection
        self.best: list[list[list[int]]] = []  # what it chose, by layer and head, in rising importance

    def at(self, text: Text, total: int) -> list[list[list[int]]]:
        """Positions by layer and KV head when ``total`` tokens are cached."""
        room = self.budget - self.sinks
        config = text.model.config
        if not self.selected or (self.refresh and total - self.selected >= (self.every or room)):
            self.selected = total
            self.best = [
                [self._best(text, layer, head)[-room:] for head in range(config.num_key_value_heads)]
                for layer in range(config.num_hidden_layers)
            ]
        new = 0 if self.frozen else min(total - self.selected, room)
        always, newest = range(self.sinks), range(total - new, total)
        return [[sorted([*always, *best[new:], *newest]) for best in layer] for layer in self.best]

    def _best(self, text: Text, layer: int, head: int) -> list[int]:
        """Positions but the sinks, in rising importance."""
        worth = self.policy(text, self.selected, layer, head)
        return sorted(range(self.sinks, self.selected), key=lambda t: worth[t])


def chain(text: Text, tokens: list[int], cached: int, seen: Seen, length: int, rule: ChoiceRule) -> list[int]:
    """``length`` tokens after the text, each from a pass over what is seen and the passes before it."""
    model, drafted, token = text.model, [], tokens[-1]
    for i in range(length):
        row = run(model, token, cached + i, seen)
        seen = [[[*own, row] for own in layer] for layer in seen]
        token = rule.best(logits(model, row.hidden), [*tokens, *drafted], 1)[0]
        drafted.append(token)
    return drafted


class Drafter(Text):
    """A draft model with a sparse cache of its own: what it knows of the text after the prompt is what it ran
    itself, over that cache."""

    def __init__(self, model: Any, held: Held, prompt: list[int]) -> None:
        super().__init__(model)
        self.kept = held
        self.extend(prompt[:-1])
        self.ran: list[tuple[int, Row]] = []  # tokens that have no place in the text yet

    def chain(self, tokens: list[int], length: int, rule: ChoiceRule) -> list[int]:
        """``length`` tokens after the text."""
        for token, row in self.ran:  # what the text took of the last chain
            if len(self.tokens) == len(tokens) - 1 or tokens[len(self.tokens)] != token:
                break
            self.tokens.append(token)
            self.rows.append(row)
        self.ran, drafted = [], []
        known = len(self.tokens)
        seen = self.held(self.kept.at(self, known))
        fresh = tokens[known:]
        while len(drafted) < length:
            for token in fresh:
                row = run(self.model, token, known + len(self.ran), seen)
                self.ran.append((token, row))
                seen = [[[*own, row] for own in layer] for layer in seen]
            best = rule.best(logits(self.model, self.ran[-1][1].hidden), [*tokens, *drafted], 1)
            fresh = best
            drafted += best
        return drafted
