"""Defects of grammars: masks of other places, matchers that stand elsewhere, and forced text that is not
drafted, which changes no text."""

from __future__ import annotations

from defects.defect import Defect

_TESTS = "tests/lossless/test_grammar.py::"
MASKS = _TESTS + "test_a_mask_is_that_of_its_path_wherever_the_matcher_stood"
EQUAL = _TESTS + "test_every_strategy_writes_what_plain_decoding_writes"
FORCED = _TESTS + "test_what_is_forced"
STEPS = _TESTS + "test_forced_text_comes_in_few_steps"
INSIDE = _TESTS + "test_drafts_stay_in_the_grammar"
LEARNS = _TESTS + "test_the_drafter_learns_how_often_an_uncertain_token_comes"
SPOILT = _TESTS + "test_limits_that_are_reached_spoil_no_other_text"
_REFUSED = "tests/sampling/test_refused_grammars.py::"
REFUSED = _REFUSED + "test_grammars_that_are_refused"
LIMITS = _REFUSED + "test_limits_of_a_trial"
NAMED = _REFUSED + "test_tokens_in_a_grammar"
SERVED = "tests/serve/test_grammars.py::"

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
    Defect(
        "texts of one grammar share a matcher",
        "sampling/masks.py",
        "self._matcher = compiled.matcher.deep_copy()\n        self._lost",
        "self._matcher = compiled.matcher\n        self._lost",
        (SERVED + "test_texts_of_one_batch",),
    ),
    Defect(
        "reach: a token more than the grammar allows",
        "sampling/masks.py",
        "return 0 if self._error(history) is not None else reached",
        "return 0 if self._error(history) is not None else min(len(path), reached + 1)",
        (MASKS, INSIDE),
    ),
    Defect(
        "reach: a token fewer than the grammar allows",
        "sampling/masks.py",
        "return 0 if self._error(history) is not None else reached",
        "return 0 if self._error(history) is not None else max(0, reached - 1)",
        (MASKS, STEPS),
    ),
    Defect(
        "reach: an end of text may stand anywhere",
        "sampling/masks.py",
        "reached += self._matcher.is_accepting()",
        "reached += 1",
        (MASKS,),
    ),
    Defect(
        "reach: an end of text may stand nowhere",
        "sampling/masks.py",
        "reached += self._matcher.is_accepting()",
        "reached += 0",
        (MASKS,),
    ),
    Defect(
        "reach: what a grammar forbids is one token of a path too few",
        "spec/drafters/candidates.py",
        "nodes[: len(nodes) - max(0, reached)]",
        "nodes[: max(0, len(nodes) - max(0, reached) - 1)]",
        (INSIDE,),
    ),
    Defect(
        "reach: what a grammar forbids is one token of a path too many",
        "spec/drafters/candidates.py",
        "nodes[: len(nodes) - max(0, reached)]",
        "nodes[: len(nodes) - max(0, reached) + 1]",
        (STEPS,),
    ),
    Defect(
        "what is compiled for a text that failed is used for others",
        "sampling/masks.py",
        "if found is None or found.spoilt:",
        "if found is None:",
        (SPOILT,),
    ),
    Defect(
        "a text that no matcher follows gets masks of its beginning",
        "sampling/masks.py",
        "            self._lost = found\n",
        "            pass\n",
        (SPOILT,),
    ),
    Defect(
        "forced bytes are off by one behind the certain tokens",
        "sampling/masks.py",
        "forced[len(self.tokenizer.decode_bytes(tokens)) :]",
        "forced[len(self.tokenizer.decode_bytes(tokens)) + 1 :]",
        (_TESTS + "test_the_end_of_forced_text_is_drafted_too",),
    ),
    Defect(
        "forced text is that of wherever the matcher stands",
        "sampling/masks.py",
        "        self._go_to([])\n        matcher",
        "        matcher",
        (MASKS,),
    ),
    Defect(
        "an uncertain token is said to be certain",
        "spec/drafters/grammar.py",
        "1.0 if place < sure else self._chance",
        "1.0",
        (LEARNS,),
    ),
    Defect(
        "how often an uncertain token comes is not learnt",
        "spec/drafters/grammar.py",
        "if sure < len(tokens) else None",
        "if sure > len(tokens) else None",
        (LEARNS,),
    ),
    Defect(
        "it is learnt of the token behind",
        "spec/drafters/grammar.py",
        "            place, token = self._open\n",
        "            place, token = self._open[0] - 1, self._open[1]\n",
        (LEARNS,),
    ),
    Defect(
        "trial: its result is ignored",
        "sampling/trial.py",
        "if wrong := json.loads(done.stdout):",
        "if (wrong := json.loads(done.stdout)) and False:",
        (REFUSED,),
    ),
    Defect(
        "trial: a crash is no reason to refuse",
        "sampling/trial.py",
        'raise TrialError("llguidance crashes on it")',
        "return",
        (_REFUSED + "test_grammars_that_nothing_stops_are_stopped",),
    ),
    Defect(
        "trial: it may take for ever",
        "sampling/trial.py",
        "capture_output=True, timeout=SECONDS)",
        "capture_output=True, timeout=600)",
        (LIMITS,),
    ),
    Defect(
        "trial: it may take all of the memory",
        "sampling/trial.py",
        "    setrlimit(RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))\n",
        "",
        (LIMITS,),
    ),
    Defect(
        "trial: llguidance's limits are not handed on",
        "sampling/trial.py",
        "matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)",
        "matcher = LLMatcher(tokenizer, text, log_level=0)",
        (LIMITS,),
    ),
    Defect(
        "trial: no text is begun",
        "sampling/trial.py",
        "for _ in range(choices):",
        "for _ in range(1):",
        (REFUSED,),
    ),
    Defect(
        "trial: text of one way may have any length",
        "sampling/trial.py",
        "if len(forced := matcher.compute_ff_bytes()) > most:",
        "if len(forced := matcher.compute_ff_bytes()) > 10 * most:",
        (REFUSED,),
    ),
    Defect(
        "trial: special tokens are not known",
        "sampling/trial.py",
        ', b"<end>", *(name.encode() for name in special)]',
        ', b"<end>"]',
        (NAMED,),
    ),
    Defect(
        "trial: ids of tokens are not known",
        "sampling/trial.py",
        '    tokens += [b""] * (size - len(tokens))\n',
        "",
        (NAMED,),
    ),
    Defect(
        "trial: modules of the working folder are imported",
        "sampling/trial.py",
        'sys.executable, "-I", "-c",',
        'sys.executable, "-c",',
        (_REFUSED + "test_a_trial_imports_nothing_of_the_working_folder",),
    ),
    Defect(
        "server: a grammar that fails midway is tried again by clients",
        "serve/answers.py",
        "answer.status, error = 400, fault",
        "error = fault",
        (SERVED + "test_a_grammar_that_fails_midway",),
    ),
]
