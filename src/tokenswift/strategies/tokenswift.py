"""TokenSwift (paper section 3): heads over a partial-cache pass, n-grams of the text, one tree.

Where a step's draft starts from:

- ``partial``: one pass of the model over the root with the partial cache. The LM head (the *backbone*)
  drafts depth 1, head i drafts depth i + 1.
- ``hidden``: the hidden state that the last verify pass left for the newest committed token. No extra
  pass; head i drafts depth i.
- ``auto``: ``partial`` once the text is longer than the budget *and* its keys and values outweigh the
  model's weights (before that a draft pass costs about what a plain step costs); ``hidden`` until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tokenswift.config import TokenSwiftOptions
from tokenswift.drafters.auto import MOST_NODES, AutoDrafter
from tokenswift.drafters.candidates import CHAIN
from tokenswift.drafters.chain import ModelDrafter
from tokenswift.drafters.context import SparseContext
from tokenswift.drafters.costs import Table
from tokenswift.drafters.drafter import Drafter, Setting
from tokenswift.drafters.guest import GuestDrafter
from tokenswift.drafters.heads import HeadTree, newest_hidden
from tokenswift.drafters.hidden import HeadGrower, HiddenDrafter
from tokenswift.drafters.lookup import Lookup
from tokenswift.drafters.ngram import NgramTable
from tokenswift.drafters.partial import PartialDrafter
from tokenswift.drafters.registry import others
from tokenswift.heads.modules import Heads
from tokenswift.interfaces import DraftModel, KVCache, Sequence
from tokenswift.memory import Need
from tokenswift.sampling.choice import Sampler
from tokenswift.tree import TreeBuilder, check_tree, tree_nodes
from tokenswift.types import DraftTree, InputError, Step

NGRAM = 4
GUEST_BUDGET, GUEST_SINKS = 512, 4  # of a draft model's cache in automatic drafting


class TokenSwift:
    """The paper's method under the exact acceptance rule.

    Args:
        options: `config.TokenSwiftOptions`, with ``tree``, ``ngrams`` and ``budget`` resolved (not None).
        model: the target.
        heads: draft heads, or None (backbone and n-grams only).
        sampler: the target's choice rule, shared for coupled candidates.
    Raises:
        InputError: for tree widths above the vocabulary, or too many nodes.
    """

    name = "tokenswift"

    def __init__(
        self, options: TokenSwiftOptions, model: DraftModel, heads: Heads | None, sampler: Sampler
    ) -> None:
        if options.tree is None or options.ngrams is None or options.budget is None:
            raise ValueError("tree, ngrams and budget must be resolved before the strategy is built")
        check_tree(options.tree, model.vocab_size)
        self.options = options
        self.acceptance = options.acceptance
        self.tree: tuple[int, ...] = options.tree
        self.budget: int = options.budget
        self.ngrams: int = options.ngrams
        self.model, self.heads, self.sampler = model, heads, sampler
        self.coupled = options.candidates == "coupled"
        self.grower = HeadTree(
            model, heads, sampler, self.tree, self.coupled, options.vocabulary == "frequent"
        )
        # coupled branches are chosen by the noise, from more than are drafted
        self.pool = self.ngrams * (4 if self.coupled and not sampler.params.greedy else 1)
        self.table = NgramTable(delay=sampler.params.window, length=NGRAM, most=self.pool)
        frozen = options.cache == "partial"
        self.context = SparseContext(model, "important", self.budget, options.sinks, 1, frozen=frozen)

    @property
    def max_nodes(self) -> int:
        """Upper bound of the tree's nodes, for the cache's scratch room."""
        return tree_nodes(self.tree) + self.ngrams * NGRAM

    def needs(self, text: int, row: int) -> list[Need]:
        """The tree's and branches' rows, and the partial cache where one is used (see `memory.Planned`)."""
        needs = [
            Need("tree", self.tree, tree_nodes(self.tree) * row),
            Need("ngrams", self.ngrams, self.ngrams * NGRAM * row),
        ]
        if self.options.cache != "full" and self.options.draft != "hidden":
            budget = self.budget  # the cache is made once the text is that long
            rows = self.context.budget + 1
            needs.append(Need("budget", budget, rows * self.model.kv_bytes, sure=text >= budget))
        return needs

    def begin(self, sequence: Sequence) -> None:
        """Load the prompt into the n-gram table and settle which tokens the heads may draft."""
        self.table.extend(sequence.tokens)
        self.grower.begin(sequence.tokens)

    def draft(self, sequence: Sequence) -> DraftTree:
        """The step's tree (paper Algorithm 1, lines 4 to 7)."""
        root = sequence.tokens[-1]
        builder = TreeBuilder(root)
        backbone = self._uses_partial(sequence)
        gamma, prefix = 0, []
        if backbone or (self.heads is not None and sequence.newest is not None):
            base = self._partial_pass(sequence) if backbone else newest_hidden(sequence)
            gamma = self.grower.grow(builder, sequence, base, backbone)
            prefix = builder.tokens[1:2] if backbone else []  # the backbone's best token
        for followers in self._branches(sequence, prefix[0] if prefix else root, len(prefix)):
            builder.add_path([*prefix, *followers])
            gamma = max(gamma, len(prefix) + len(followers))
        return builder.build(gamma)

    def observe(self, sequence: Sequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Feed the n-gram table and the partial cache."""
        self.table.extend(list(step.token_ids))
        if not self.grower.backbone.dropped:
            self.context.observe(sequence, len(nodes))

    def _uses_partial(self, sequence: Sequence) -> bool:
        mode, total = self.options.draft, sequence.cache.length
        if mode == "hidden" or sequence.newest is None or self.grower.backbone.dropped:
            return False
        if mode == "partial":
            return True
        return total > self.budget and total * self.model.kv_bytes > self.model.weight_bytes

    def _partial_pass(self, sequence: Sequence) -> Tensor:
        """Run the root over the partial cache; its hidden state (1, D)."""
        root = torch.tensor(sequence.tokens[-1:], device=self.model.device)
        position = torch.tensor([len(sequence.tokens) - 1], device=self.model.device)
        result = self.model.forward(root, position, self._draft_cache(sequence))
        sequence.draft_passes += 1
        return result.hidden

    def _draft_cache(self, sequence: Sequence) -> KVCache:
        # While everything fits the budget, the full cache is the partial cache.
        if self.options.cache == "full" or sequence.cache.length < self.budget:
            return sequence.cache
        return self.context.cache(sequence)

    def _branches(self, sequence: Sequence, start: int, offset: int) -> list[tuple[int, ...]]:
        """The best n-gram branches after token ``start``, which stands ``offset`` places after the root."""
        if not self.ngrams:
            return []
        least = self.options.ngram_count or 1
        found = [entry for entry in self.table.lookup(start, self.pool) if entry[1] >= least]
        if len(found) <= self.ngrams:
            return [followers for followers, _ in found]
        grams = torch.tensor([followers for followers, _ in found], device=self.model.device)
        score = torch.tensor([math.log(count) for _, count in found], device=self.model.device)
        for i in range(grams.shape[1]):
            score = score + self.sampler.noise.gather(len(sequence.tokens) + offset + i, grams[:, i])
        best = score.topk(self.ngrams).indices.tolist()
        return [found[i][0] for i in best]


class AutoTokenSwift:
    """TokenSwift with a tree of its own for every step: what pays, by measured costs (`drafters.auto`).

    Args:
        options: `config.TokenSwiftOptions`, with ``budget`` resolved; ``tree`` is not used.
        model: the target.
        heads: draft heads, or None (partial passes and matches of the text only).
        sampler: the target's choice rule, shared for coupled candidates.
        table: gives the measured times of passes, when a run begins.
        guest: a draft model, or None.
        frequent: token ids that it may draft, besides the prompt's; None for all.
    Raises:
        InputError: the file for explanations cannot be written.
    """

    name = "tokenswift"
    acceptance = "exact"
    max_nodes = MOST_NODES + 1

    def __init__(
        self,
        options: TokenSwiftOptions,
        model: DraftModel,
        heads: Heads | None,
        sampler: Sampler,
        table: Callable[[], Table],
        guest: DraftModel | None = None,
        frequent: Tensor | None = None,
    ) -> None:
        if options.budget is None:
            raise ValueError("budget must be resolved before the strategy is built")
        explain = None if options.explain is None else Path(options.explain)
        if explain is not None and (explain.is_dir() or not explain.absolute().parent.is_dir()):
            raise InputError(f"explain is {str(explain)!r}; valid: a file in a folder that is there")
        self.model, self.budget = model, options.budget
        partial = options.draft != "hidden" and options.cache != "full"
        frozen = options.cache == "partial"
        self.context = None
        if partial:
            self.context = SparseContext(
                model, "important", options.budget, options.sinks, CHAIN + 1, frozen=frozen
            )
        self.guest = None
        coupled = options.candidates == "coupled"
        if guest is not None:
            self.guest = ModelDrafter(
                guest, sampler, "streaming", GUEST_BUDGET, GUEST_SINKS, CHAIN, coupled, frequent
            )
        grower = None
        if heads is not None:
            grower = HeadGrower(model, heads, options.vocabulary == "frequent")
        drafters: list[Drafter] = []
        if options.ngrams != 0:
            drafters.append(Lookup(sampler.params.window > 0))
        if grower is not None and options.draft != "partial":
            drafters.append(HiddenDrafter(grower))
        if self.context is not None:
            drafters.append(PartialDrafter(model, self.context, grower))
        if self.guest is not None:
            drafters.append(GuestDrafter(self.guest, model))
        setting = Setting(model, sampler, coupled)
        drafters += [drafter(setting) for drafter in others()]
        priors = None if heads is None else heads.calibration
        self.drafter = AutoDrafter(drafters, sampler, table, priors, coupled, explain)

    def needs(self, text: int, row: int) -> list[Need]:
        """The widest tree's rows, and the partial cache where one may be used (see `memory.Planned`)."""
        needs = [Need("tree", "auto", self.max_nodes * row)]
        if self.context is not None:
            rows = self.context.budget + CHAIN + 1
            size = rows * self.model.kv_bytes
            needs.append(Need("budget", self.budget, size, sure=text > self.budget))
        if self.guest is not None:
            needs.append(Need("draft_model", "given", self.guest.slots * self.guest.model.kv_bytes))
        return needs

    def begin(self, sequence: Sequence) -> None:
        """Read the prompt."""
        self.drafter.begin(sequence)

    def draft(self, sequence: Sequence) -> DraftTree:
        """The step's tree."""
        return self.drafter.draft(sequence)

    def observe(self, sequence: Sequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Learn from the step."""
        self.drafter.observe(sequence, step, nodes)
