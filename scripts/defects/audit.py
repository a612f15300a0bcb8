"""Defects of `tokenswift audit`."""

from __future__ import annotations

from defects.defect import Defect

REFERENCE = "tests/audit/test_rounding.py"
VERDICT = "tests/audit/test_verdict.py"
DIVERGENCES = "tests/audit/test_equality.py::test_a_tie_between_passes_that_are_both_wrong_is_no_near_tie"

AUDIT = [
    Defect(
        "audit: an error that all passes share is sound",
        "audit/logits.py",
        "for passes in (self.one_row, self.tree))",
        "for passes in ())",
        (REFERENCE,),
    ),
    Defect(
        "audit: one-row passes are not compared with the reference",
        "audit/logits.py",
        "for passes in (self.one_row, self.tree))",
        "for passes in (self.tree,))",
        (REFERENCE,),
    ),
    Defect(
        "audit: a pass may be off nearly everywhere, if never far",
        "audit/rounding.py",
        " and distance.typical <= self.allowed.typical",
        "",
        (REFERENCE,),
    ),
    Defect(
        "audit: transformers' pass in its own dtype is the reference",
        "audit/rounding.py",
        "    with _Finer(low, high):\n",
        "    if True:\n",
        (REFERENCE,),
    ),
    Defect(
        "audit: verdict ignores distribution p-values",
        "audit/verdict.py",
        "            if test.p < DISTRIBUTION_LIMIT:\n",
        "            if False:\n",
        (VERDICT,),
    ),
    Defect(
        "audit: verdict ignores runs that differ from plain decoding",
        "audit/verdict.py",
        "            if test.same < test.samples:\n",
        "            if False:\n",
        (VERDICT,),
    ),
    Defect(
        "audit: verdict ignores the numeric error of the texts",
        "audit/verdict.py",
        "        for number, error in enumerate(self.errors, 1):\n",
        "        for number, error in enumerate([], 1):\n",
        (VERDICT,),
    ),
    Defect(
        "audit: near-tie ignores reproduced",
        "audit/equality.py",
        "        passes = self.reproduced and self.shift <= bound",
        "        passes = self.shift <= bound",
        (VERDICT,),
    ),
    Defect(
        "audit: near-tie ignores the reference",
        "audit/equality.py",
        "        return passes and self.off <= self.allowed and self.reference_shift <= 2 * bound",
        "        return passes",
        (DIVERGENCES, VERDICT),
    ),
    Defect(
        "audit: near-tie ignores the reference, seen by texts alone",
        "audit/equality.py",
        "        return passes and self.off <= self.allowed and self.reference_shift <= 2 * bound",
        "        return passes",
        (DIVERGENCES,),
    ),
    Defect(
        "audit: headline silent on near-ties",
        "audit/verdict.py",
        "        ties = len(self.near_ties)\n",
        "        ties = 0\n",
        (VERDICT,),
    ),
    Defect(
        "audit: a skipped strategy counts as passed",
        "audit/verdict.py",
        "            if c.strategy not in self.skipped and (",
        "            if (",
        (VERDICT,),
    ),
    Defect(
        "audit: headline silent on skipped strategies",
        "audit/verdict.py",
        '        return text + (f"; not run: {\', \'.join(self.skipped)}" if self.skipped else "")',
        "        return text",
        (VERDICT,),
    ),
]
