"""Defects of grammars: masks of other places, matchers that stand elsewhere, and forced text that is not
drafted, which changes no text."""

from __future__ import annotations

from defects.defect import Defect

_TESTS = "tests/lossless/test_grammar.py::"
MASKS = _TESTS + "test_a_mask_is_that_of_its_path_wherever_the_matcher_stood"
EQUAL = _TESTS + "test_every_strategy_writes_what_plain_decoding_writes"
FORCED = _TESTS + "test_what_is_forced"
STEPS = _TESTS + "test_forced_text_comes_in_few_steps"

GRAMMARS = [
    Defect(
        "a row's mask is that of its node's parent",
        "sampling/masks.py",
        "self.allowed(history, path) if at == end else None",
        "self.allowed(history, path[:-1]) if at == end else None",
        (EQUAL,),
    ),
    Defect(
        "a row's mask is the root's",
        "sampling/masks.py",
        "self.allowed(history, path) if at == end else None",
        "self.allowed(history, []) if at == end else None",
        (EQUAL,),
    ),
    Defect(
        "a matcher is not rolled back",
        "sampling/masks.py",
        "            self._matcher.rollback(back)\n",
        "            pass\n",
        (MASKS, EQUAL),
    ),
    Defect(
        "a matcher is rolled back by one token too few",
        "sampling/masks.py",
        "            self._matcher.rollback(back)\n",
        "            self._matcher.rollback(back - 1)\n",
        (MASKS, EQUAL),
    ),
    Defect(
        "masks of the step before are kept",
        "sampling/masks.py",
        "self._after, self._made = [], {}",
        "self._after = []",
        (MASKS, EQUAL),
    ),
    Defect(
        "a matcher consumes the end of a text",
        "sampling/masks.py",
        "if any(token in self.ends for token in rest):",
        "if False:",
        (MASKS,),
    ),
    Defect(
        "log-probabilities are those of the row without its mask",
        "sampling/choice.py",
        "masks=masks).masked()",
        "masks=()).masked()",
        (_TESTS + "test_log_probabilities_are_those_of_the_masked_row",),
    ),
    Defect(
        "forced text is drafted from the middle on",
        "spec/drafters/grammar.py",
        "for place, token in enumerate(tokens[:MOST]):",
        "for place, token in enumerate(tokens[1:MOST]):",
        (STEPS,),
    ),
    Defect(
        "only tokens that are certain are drafted, where the tokenizer has several ways",
        "sampling/masks.py",
        "        if rest:\n",
        "        if False:\n",
        (_TESTS + "test_the_end_of_forced_text_is_drafted_too",),
    ),
    Defect(
        "the end of a complete text is not drafted",
        "sampling/masks.py",
        "matcher.is_stopped() and len(self.ends) == 1:",
        "False:",
        (FORCED,),
    ),
    Defect(
        "what a grammar does not allow is verified",
        "spec/adaptive/recipe.py",
        "            made.tree.given[node] = 0.0\n",
        "            pass\n",
        (_TESTS + "test_drafts_stay_in_the_grammar",),
    ),
    Defect(
        "trees of fixed widths hold what a grammar does not allow",
        "spec/drafters/recipe.py",
        "        if not out:\n            return tree.build()\n",
        "        return tree.build()\n",
        (_TESTS + "test_drafts_stay_in_the_grammar",),
    ),
]
