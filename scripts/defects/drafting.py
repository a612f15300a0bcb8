"""Defects of drafting, heads and training: they never change the text, so only tests of drafts see them."""

from __future__ import annotations

from defects.defect import Defect

_ACCEPTED = "tests/spec/drafters/test_accepted.py::"
VERIFIED = _ACCEPTED + "test_heads_on_the_verified_state"
PARTIAL = _ACCEPTED + "test_heads_on_a_partial_pass"
NGRAMS = _ACCEPTED + "test_ngrams_of_a_text_that_repeats"
MEDUSA = _ACCEPTED + "test_medusa"
CHAINS = _ACCEPTED + "test_chains"
_REFERENCE = "tests/spec/drafters/test_reference.py::"
TREES = _REFERENCE + "test_tokenswift"
FREQUENT = _REFERENCE + "test_heads_draft_frequent_tokens_and_the_prompts"
HELD = _REFERENCE + "test_what_the_dynamic_cache_holds"
RATES = "tests/spec/drafters/test_rates.py"
LEARNING = "tests/spec/drafters/test_learning.py"

DRAFTING = [
    Defect(
        "conditioned heads are fed the root for every drafted token",
        "spec/drafters/heads.py",
        "last = candidates.tokens(nodes[: len(states)])",
        "last = [candidates.tree.tokens[0] for node in nodes[: len(states)]]",
        (VERIFIED,),
    ),
    Defect(
        "conditioned heads are fed the first drafted token",
        "spec/drafters/heads.py",
        "last = candidates.tokens(nodes[: len(states)])",
        "last = [[*candidates.path(node), candidates.tree.tokens[0]][0] for node in nodes[: len(states)]]",
        (VERIFIED,),
    ),
    Defect(
        "conditioned heads are fed the token before the root",
        "spec/drafters/heads.py",
        "last = candidates.tokens(nodes[: len(states)])",
        "last = [candidates.tree.tokens[i] if i else candidates.text[-2] for i in nodes[: len(states)]]",
        (TREES,),
    ),
    Defect(
        "the hidden state is taken one row early",
        "spec/drafters/heads.py",
        "sequence.newest.hidden[sequence.newest_row][None]",
        "sequence.newest.hidden[sequence.newest_row - 1][None]",
        (VERIFIED,),
    ),
    Defect(
        "the hidden state is the last row's",
        "spec/drafters/heads.py",
        "sequence.newest.hidden[sequence.newest_row][None]",
        "sequence.newest.hidden[-1:]",
        (TREES,),
    ),
    Defect(
        "linear heads are not serial",
        "spec/drafters/heads.py",
        "heads.advance(head, states, ",
        "heads.advance(head, self._base, ",
        (VERIFIED,),
    ),
    Defect(
        "parallel heads in reverse order",
        "spec/drafters/heads.py",
        "levels.level(head, states, last)",
        "levels.level(self.depth - 1 - head, states, last)",
        (VERIFIED,),
    ),
    Defect(
        "a level is ranked with the noise of the place before",
        "spec/drafters/candidates.py",
        "positions = [len(self.text) + len(path) for path in paths]",
        "positions = [len(self.text) + len(path) - 1 for path in paths]",
        (VERIFIED,),
    ),
    Defect(
        "parallel heads forget what they drafted when they penalise",
        "spec/drafters/candidates.py",
        "LogitRows(logits, self.text, paths,",
        "LogitRows(logits, self.text, [[]] * len(paths),",
        (TREES,),
    ),
    Defect(
        "all nodes go on from the first one's state",
        "spec/drafters/heads.py",
        "states = states[to_device(rows, states.device)]",
        "states = states[[0] * len(rows)]",
        (TREES,),
    ),
    Defect(
        "every level is as wide as the first",
        "spec/drafters/candidates.py",
        "return self.widths[depth]",
        "return self.widths[0]",
        (TREES,),
    ),
    Defect(
        "packed heads: a state gets the norm of the model's own",
        "spec/heads/packed.py",
        "self._weights[0 if first else 1]",
        "self._weights[0]",
        (TREES,),
    ),
    Defect(
        "columns of the draft vocabulary are read as token ids",
        "spec/drafters/heads.py",
        "candidates.rank(nodes, logits, head, levels.subset, kind",
        "candidates.rank(nodes, logits, head, None, kind",
        (FREQUENT,),
    ),
    Defect(
        "n-gram branches after the wrong token",
        "spec/drafters/lookup.py",
        "self._branches(sequence, tree.tokens[start], tree",
        "self._branches(sequence, tree.tokens[0], tree",
        (NGRAMS,),
    ),
    Defect(
        "n-gram branches are chosen with the noise of the place before",
        "spec/drafters/lookup.py",
        "len(sequence.tokens) + depth + i,",
        "len(sequence.tokens) + depth + i - 1,",
        (TREES,),
    ),
    Defect(
        "the n-gram table knows the prompt alone",
        "spec/drafters/lookup.py",
        "        self.table.extend(outcome.tokens)",
        "        pass",
        (TREES,),
    ),
    Defect(
        "the dynamic cache is never fed",
        "spec/drafters/partial.py",
        "            self.context.observe(sequence, outcome.nodes)",
        "            pass",
        (PARTIAL,),
    ),
    Defect(
        "the dynamic cache is never fed, seen by its contents alone",
        "spec/drafters/partial.py",
        "            self.context.observe(sequence, outcome.nodes)",
        "            pass",
        (HELD,),
    ),
    Defect(
        "a draft pass one position late",
        "spec/drafters/partial.py",
        "torch.tensor([start + len(path)])",
        "torch.tensor([start + len(path) + 1])",
        (PARTIAL,),
    ),
    Defect(
        "a draft pass over the token before the root",
        "spec/drafters/partial.py",
        "path[-1] if path else sequence.tokens[-1]",
        "path[-1] if path else sequence.tokens[-2]",
        (PARTIAL,),
    ),
    Defect(
        "the partial cache is selected with another row's query",
        "spec/drafters/partial.py",
        "            row, windows = sequence.newest_row,",
        "            row, windows = 0,",
        (TREES,),
    ),
    Defect(
        "the partial cache takes in rows one position early",
        "spec/drafters/partial.py",
        "            self.sparse.append(full, full.length - committed, full.length)",
        "            self.sparse.append(full, full.length - committed - 1, full.length - 1)",
        (TREES,),
    ),
    Defect(
        "the partial cache is never selected anew",
        "spec/drafters/partial.py",
        "        return sparse.exhausted if self.refresh is None else",
        "        return False if self.refresh is None else",
        (TREES,),
    ),
    Defect(
        "the most important entries are replaced first",
        "kv/select.py",
        "    return torch.cat([head, best.flip(1)], dim=1)",
        "    return torch.cat([head, best], dim=1)",
        (TREES,),
    ),
    Defect(
        "importance looks at one query head of a group",
        "kv/select.py",
        "query[:, row].view(kv_heads, -1, query.shape[-1]).sum(1)",
        "query[:, row].view(kv_heads, -1, query.shape[-1])[:, 0]",
        (TREES,),
    ),
    Defect(
        "a chain is drafted with the noise of the next place",
        "spec/drafters/candidates.py",
        "positions = [len(self.text) + len(path) for path in paths]",
        "positions = [len(self.text) + len(path) + 1 for path in paths]",
        (CHAINS,),
    ),
    Defect(
        "all passes of a chain at one position",
        "spec/drafters/partial.py",
        "torch.tensor([start + len(path)])",
        "torch.tensor([start])",
        (CHAINS,),
    ),
    Defect(
        "a chain does not see its own tokens",
        "spec/drafters/partial.py",
        "sparse.grow(1)  #",
        "pass  #",
        (CHAINS,),
    ),
    Defect(
        "a chain forgets what is ahead of it",
        "spec/drafters/candidates.py",
        "return [*self.ahead, *self.tree.path(node)]",
        "return self.tree.path(node)",
        (CHAINS,),
    ),
    Defect(
        "draft rows that are used again do not count for positions",
        "spec/drafters/model.py",
        "        start = self._known + same - self._shift",
        "        start = self._known - self._shift",
        (CHAINS,),
    ),
    Defect(
        "an inner step of TriForce at the text's end",
        "spec/drafters/checked.py",
        " + len(text) + len(chain) - 1",
        " + len(text) - 1",
        (CHAINS,),
    ),
    Defect(
        "the second head drafts the first token",
        "spec/drafters/heads.py",
        "self.levels.start(base), 0",
        "self.levels.start(base), 1",
        (MEDUSA,),
    ),
    Defect(
        "n-grams enter one token early",
        "spec/drafters/lookup.py",
        "        ready = len(text) - self.delay - self.length + 1",
        "        ready = len(text) - self.delay - self.length + 2",
        ("tests/spec/drafters/test_ngram.py",),
    ),
    Defect(
        "n-grams enter one token early, seen by drafts alone",
        "spec/drafters/lookup.py",
        "        ready = len(text) - self.delay - self.length + 1",
        "        ready = len(text) - max(0, self.delay - 1) - self.length + 1",
        (TREES,),
    ),
    Defect(
        "the oldest of equal n-grams comes first",
        "spec/drafters/lookup.py",
        "        counts[followers] = (count + 1 << _COUNT) + position",
        "        counts[followers] = (count + 1 << _COUNT) + (1 << 30) - position",
        ("tests/spec/drafters/test_ngram.py",),
    ),
    Defect(
        "all linear heads share the first one's norm",
        "spec/heads/linear.py",
        "return self.layers[i].post_layernorm(states)",
        "return self.layers[0].post_layernorm(states)",
        (VERIFIED,),
    ),
    Defect(
        "a conditioned head's own state gets the norm of the model's",
        "spec/heads/conditioned.py",
        "previous, base, embeds, i == 0)",
        "previous, base, embeds, True)",
        ("tests/spec/heads/test_heads.py::test_conditioned_heads_by_definition",),
    ),
    Defect(
        "eval-heads: noise of the place before",
        "train/evaluate.py",
        "    gumbel = noise.at(at + 1)",
        "    gumbel = noise.at(at)",
        (RATES,),
    ),
    Defect(
        "eval-heads: heads are fed the token before",
        "train/evaluate.py",
        "embed(tokens[t + 1 + i : t + 2 + i])",
        "embed(tokens[t + i : t + 1 + i])",
        (RATES,),
    ),
    Defect(
        "eval-heads: penalty window one token short",
        "train/evaluate.py",
        "    recent = tokens[None, : at + 1]",
        "    recent = tokens[None, max(0, at + 2 - sampling.penalty_window) : at + 1]",
        (RATES,),
    ),
    Defect(
        "every head learns what the first one should draft",
        "train/loss.py",
        "(rows[:, i : i + m].flatten(0, 1)",
        "(rows[:, :m].flatten(0, 1)",
        (LEARNING,),
    ),
    Defect(
        "heads learn from the embedding of the token before",
        "train/heads.py",
        "tokens[:, 1 + i : 1 + i + m]",
        "tokens[:, i : i + m]",
        (LEARNING,),
    ),
    Defect(
        "heads learn from states of each other's place, not serially",
        "train/heads.py",
        "self.heads.advance(i, state, start, embeds)",
        "self.heads.advance(i, start, start, embeds)",
        (LEARNING,),
    ),
    Defect(
        "the closed form looks at the embedding of the token before",
        "train/heads.py",
        'item["tokens"][1 : n + 1]',
        'item["tokens"][:n]',
        (LEARNING,),
    ),
]
