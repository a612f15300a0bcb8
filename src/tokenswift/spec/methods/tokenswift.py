"""TokenSwift as published (section 3): heads over a partial-cache pass, n-grams of the text, one tree.

Where a step's draft starts from:

- ``partial``: one pass of the model over the root with the partial cache. The LM head (the *backbone*)
  drafts depth 1, head i drafts depth i + 1.
- ``hidden``: the hidden state that the last verify pass left for the newest committed token. No extra
  pass; head i drafts depth i.
- ``auto``: ``partial`` once the text is longer than the budget *and* its keys and values outweigh the
  model's weights (before that a draft pass costs about what a plain step costs); ``hidden`` until then.
"""

from __future__ import annotations

from tokenswift.interfaces import TokenSequence
from tokenswift.method_options import TokenSwiftOptions
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.drafters.drafter import Drafter
from tokenswift.spec.drafters.heads import HeadDrafter
from tokenswift.spec.drafters.lookup import LENGTH, Ngrams
from tokenswift.spec.drafters.partial import PartialDrafter, SparseContext
from tokenswift.spec.drafters.recipe import FixedWidths
from tokenswift.spec.methods.resources import Resources
from tokenswift.tree import check_tree


class TokenSwift(FixedWidths):
    """The paper's method.

    Args:
        llm: model and heads (without heads: backbone and n-grams only).
        options: `method_options.TokenSwiftOptions`.
        sampler: the target's choice rule, shared for coupled candidates.
    Raises:
        InputError: tree widths above the vocabulary, or too many nodes.
    """

    name = "tokenswift"

    def __init__(self, llm: Resources, options: TokenSwiftOptions, sampler: Sampler) -> None:
        target, coupled = llm.target, options.candidates == "coupled"
        tree, self.target, self.mode = options.tree, llm.target, options.draft
        check_tree(tree, target.vocab_size)
        self.budget = options.budget
        heads, frequent = llm.heads, options.vocabulary == "frequent"
        self.heads = [] if heads is None else [HeadDrafter(target, heads, frequent)]
        context, frozen = None, options.cache == "partial"
        if options.cache != "full":
            context = SparseContext(target, "important", self.budget, options.sinks, 1, frozen=frozen)
        self.partial = PartialDrafter(target, context, next(iter(self.heads), None), least=self.budget)
        count = options.ngrams
        self.ngrams = [Ngrams(count, options.ngram_count, sampler, coupled)] if count else []
        drafters = [*self.heads, *([] if self.mode == "hidden" else [self.partial]), *self.ngrams]
        super().__init__(drafters, sampler, coupled, tree, ("tree", tree), options.acceptance, most=1)

    @property
    def max_nodes(self) -> int:
        """Upper bound of the tree's nodes: the heads' and the branches'."""
        return self.nodes + sum(ngrams.count * LENGTH for ngrams in self.ngrams)

    def asked(self, sequence: TokenSequence) -> list[Drafter]:
        """The paper's Algorithm 1, lines 4 to 7: what drafts the tree, then the n-grams."""
        total = sequence.cache.length
        pays = total > self.budget and total * self.target.kv_bytes > self.target.weight_bytes
        passes = self.mode == "partial" or (self.mode == "auto" and pays)
        if passes and sequence.newest is not None and not self.partial.refusals.dropped:
            return [self.partial, *self.ngrams]
        return [*self.heads, *self.ngrams]
