"""Mutation checks: plant known defects one at a time and see that the tests catch every one.

    python scripts/mutations.py [--only WORD] [--list]

Each defect is an exact replacement of text in a temporary copy of ``src``; the tests named with it run
against that copy. A replacement that no longer matches, or tests that fail without any defect, are
errors. Exit code 0 when all defects are caught, 1 when one is missed, 2 for an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/tokenswift")
LAW = "tests/lossless/test_law.py"
TOKENS = "tests/lossless/test_tokens.py::test_tiny_models_of_every_family"
REFERENCE = "tests/test_audit_reference.py"
VERDICT = "tests/test_audit_report.py"
DIVERGENCES = "tests/test_audit.py::test_a_tie_between_passes_that_are_both_wrong_is_no_near_tie"
TIMEOUT = 600


@dataclass(frozen=True)
class Defect:
    """One planted defect: ``old`` occurs exactly once in ``file`` and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


DEFECTS = [
    Defect(
        "penalty window does not slide along a path",
        "sampling.py",
        "        drops.append(min(over, len(tail)))\n        extras.append(extra + [filler]",
        "        drops.append(0)\n        extras.append([filler] * len(extra) + [filler]",
        ("tests/test_sampling.py", LAW),
    ),
    Defect(
        "penalty window does not slide (one row)",
        "sampling.py",
        "        known = tail + paths[0]\n",
        "        known = list(tail)\n",
        ("tests/test_sampling.py", LAW),
    ),
    Defect(
        "penalty window one token too long",
        "sampling.py",
        "        ids = known[max(0, len(known) + gaps[0] - window) :]",
        "        ids = known[max(0, len(known) + gaps[0] - window - 1) :]",
        ("tests/test_sampling.py", LAW),
    ),
    Defect(
        "noise shared between positions",
        "noise.py",
        "    return mix64(mix64(seed + _GOLDEN) + position * _POSITION)",
        "    return mix64(mix64(seed + _GOLDEN) + _POSITION)",
        ("tests/test_noise.py",),
    ),
    Defect(
        "noise shared between positions, seen by the law alone",
        "noise.py",
        "    return mix64(mix64(seed + _GOLDEN) + position * _POSITION)",
        "    return mix64(mix64(seed + _GOLDEN) + _POSITION)",
        (LAW,),
    ),
    Defect(
        "noise shared between tokens and positions (token + position)",
        "noise.py",
        "    words = tokens.mul(_signed(_GOLDEN))\n    words.add_(_signed(position_key(seed, position)))",
        "    words = (tokens + position).mul_(_signed(_GOLDEN))\n"
        "    words.add_(_signed(position_key(seed, 0)))",
        ("tests/test_noise.py",),
    ),
    Defect(
        "draws per path used as the exact rule",
        "decode.py",
        "                accepted = accept_exact(tree, logits, sequence.tokens, sampler, all_rows=on_gpu)",
        "                accepted = accept_published(tree, logits, sequence.tokens, sampler)",
        (TOKENS,),
    ),
    Defect(
        "wrong position of a node",
        "decode.py",
        "positions = torch.tensor(tree.depths, device=model.device) + root_position",
        "positions = torch.arange(len(tree), device=model.device) + root_position",
        (TOKENS,),
    ),
    Defect(
        "root one position too early",
        "decode.py",
        "            root_position = len(sequence.tokens) - 1",
        "            root_position = max(0, len(sequence.tokens) - 2)",
        ("tests/test_decode.py",),
    ),
    Defect(
        "stale partial-cache row leaks into the full cache",
        "cache/sparse.py",
        "        self._put(full.data[:, :, start:end], start)",
        "        full.data[:, :, start:end] = self.data[:, :, : end - start]",
        ("tests/test_cache.py", TOKENS),
    ),
    Defect(
        "draft pass commits to the full cache",
        "strategies/tokenswift.py",
        "        sequence.draft_passes += 1\n        return result.hidden",
        "        sequence.draft_passes += 1\n        sequence.cache.commit((0,))\n"
        "        return result.hidden",
        (TOKENS,),
    ),
    Defect(
        "draft branch accepted without verification",
        "accept.py",
        "        child = below[node].get(token)\n",
        "        child = below[node].get(token) or next(iter(below[node].values()), None)\n",
        ("tests/test_accept.py", LAW),
    ),
    Defect(
        "n-gram branch accepted without verification",
        "accept.py",
        "        child = below[node].get(token)\n",
        "        grams = [c for c in below[node].values() if tree.ngram[c]]\n"
        "        child = below[node].get(token) or (grams[0] if grams else None)\n",
        ("tests/test_accept.py", TOKENS),
    ),
    Defect(
        "off by one in compaction",
        "cache/full.py",
        "            rows = torch.tensor(nodes[kept:], device=self.data.device) + start\n",
        "            rows = torch.tensor(nodes[kept:], device=self.data.device) + start - 1\n",
        ("tests/test_cache.py",),
    ),
    Defect(
        "compaction skipped",
        "cache/full.py",
        "        if kept < len(nodes):\n",
        "        if False:\n",
        ("tests/test_cache.py",),
    ),
    Defect(
        "compaction skipped, seen by token equality alone",
        "cache/full.py",
        "        if kept < len(nodes):\n",
        "        if False:\n",
        (TOKENS,),
    ),
    Defect(
        "rejected row kept by the commit",
        "cache/full.py",
        "        self._length = start + len(nodes)",
        "        self._length = start + len(nodes) + (len(nodes) > 2)",
        (TOKENS,),
    ),
    Defect(
        "node does not see its parent",
        "tree.py",
        "        row = bytearray(rows[parent]) if parent >= 0 else bytearray(len(parents))\n"
        "        row[node] = 1",
        "        row = bytearray(rows[parent]) if parent >= 0 else bytearray(len(parents))\n"
        "        row[parent] = 0\n        row[node] = 1",
        ("tests/test_tree.py",),
    ),
    Defect(
        "siblings see each other",
        "tree.py",
        "        row[node] = 1\n",
        "        row[: node + 1] = b'\\x01' * (node + 1)\n",
        ("tests/test_tree.py",),
    ),
    Defect(
        "siblings see each other, seen by token equality alone",
        "tree.py",
        "        row[node] = 1\n",
        "        row[: node + 1] = b'\\x01' * (node + 1)\n",
        (TOKENS,),
    ),
    Defect(
        "the last accepted row is not kept",
        "decode.py",
        "            nodes = accepted.nodes[: len(new)]",
        "            nodes = accepted.nodes[: max(1, len(new) - 1)]",
        ("tests/test_decode.py",),
    ),
    Defect(
        "a rejected branch that cannot be chosen from ends the run",
        "accept.py",
        "            choices = None\n    nodes = [0]",
        "            raise\n    nodes = [0]",
        ("tests/test_accept.py",),
    ),
    Defect(
        "a row of the walk goes unchecked",
        "sampling.py",
        "        if not math.isfinite(values[best[0]]):\n            _refuse(row)\n",
        "",
        ("tests/test_accept.py",),
    ),
    Defect(
        "published rule: the first of tied paths always wins",
        "accept.py",
        "    winner = 0 if _tie_break(sampler.params.seed, len(history)) else -1",
        "    winner = 0",
        ("tests/test_accept.py",),
    ),
    Defect(
        "published rule: the first of tied paths always wins, seen by the closed form alone",
        "accept.py",
        "    winner = 0 if _tie_break(sampler.params.seed, len(history)) else -1",
        "    winner = 0",
        ("tests/test_audit.py",),
    ),
    Defect(
        "published rule: a branch that repeats a path has no draw of its own",
        "tree.py",
        "[*leaves, *tree.branches]] or [[0]]",
        "[*leaves, *(end for end in tree.branches if tree.ngram[end])]] or [[0]]",
        ("tests/test_accept.py",),
    ),
    Defect(
        "published rule: the best ranked path stands first",
        "tree.py",
        "    leaves.sort(key=lambda node: (tree.depths[node], node), reverse=True)",
        "    leaves.sort(key=lambda node: (tree.depths[node], node))",
        ("tests/test_accept.py",),
    ),
    Defect(
        "published rule: paths share their draws",
        "accept.py",
        "    numbers = torch.tensor(paths, device=scores.device)",
        "    numbers = torch.zeros(len(paths), dtype=torch.long, device=scores.device)",
        ("tests/test_audit.py",),
    ),
    Defect(
        "closed form of the published rule: ties go to the first path",
        "audit/law.py",
        "            wins = reach[i][length] * (first + last) / 2",
        "            wins = reach[i][length] * first",
        ("tests/test_audit.py",),
    ),
    Defect(
        "audit: an error that all passes share is sound",
        "audit/passes.py",
        "for passes in (self.one_row, self.tree))",
        "for passes in ())",
        (REFERENCE,),
    ),
    Defect(
        "audit: one-row passes are not compared with the reference",
        "audit/passes.py",
        "for passes in (self.one_row, self.tree))",
        "for passes in (self.tree,))",
        (REFERENCE,),
    ),
    Defect(
        "audit: a pass may be off nearly everywhere, if never far",
        "audit/reference.py",
        " and distance.typical <= self.allowed.typical",
        "",
        (REFERENCE,),
    ),
    Defect(
        "audit: transformers' pass in its own dtype is the reference",
        "audit/reference.py",
        "    with _Finer(low, high):\n",
        "    if True:\n",
        (REFERENCE,),
    ),
    Defect(
        "audit: the toy has no small window",
        "audit/toy.py",
        '    if config.get("sliding_window"):\n',
        "    if False:\n",
        (REFERENCE,),
    ),
    Defect(
        "audit: the toy's prompt is within a chunk",
        "audit/toy.py",
        "(PREFILL_CHUNK + 5,)",
        "(PREFILL_CHUNK - 5,)",
        (REFERENCE,),
    ),
    Defect(
        "audit: verdict ignores law p-values",
        "audit/report.py",
        "            if test.p < LAW_LIMIT:\n",
        "            if False:\n",
        (VERDICT,),
    ),
    Defect(
        "audit: verdict ignores runs that differ from plain decoding",
        "audit/report.py",
        "            if test.same is not None and test.same < test.samples:\n",
        "            if False:\n",
        (VERDICT,),
    ),
    Defect(
        "audit: verdict ignores the published control",
        "audit/report.py",
        "            if test.p >= BIAS_LIMIT:\n",
        "            if False:\n",
        (VERDICT,),
    ),
    Defect(
        "audit: verdict ignores the numeric error of the texts",
        "audit/report.py",
        "for i, error in enumerate(self.errors, 1)]",
        "for i, error in enumerate([], 1)]",
        (VERDICT,),
    ),
    Defect(
        "audit: verdict ignores the numeric error of the toy",
        "audit/report.py",
        "        measured += [(",
        "        _ = [(",
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
        "audit/report.py",
        "        ties = len(self.near_ties)\n",
        "        ties = 0\n",
        (VERDICT,),
    ),
    Defect(
        "audit: a skipped strategy counts as passed",
        "audit/report.py",
        "            if c.strategy not in self.skipped and (",
        "            if (",
        (VERDICT,),
    ),
    Defect(
        "audit: headline silent on skipped strategies",
        "audit/report.py",
        '        return text + (f"; not run: {\', \'.join(self.skipped)}" if self.skipped else "")',
        "        return text",
        (VERDICT,),
    ),
]


def plant(defect: Defect, copy: Path) -> None:
    """Write the defect into the copy of ``src``."""
    file = copy / "tokenswift" / defect.file
    text = file.read_text(encoding="utf-8")
    found = text.count(defect.old)
    if found != 1:
        raise SystemExit2(f"{defect.name}: the text to replace occurs {found} times in {defect.file}")
    file.write_text(text.replace(defect.old, defect.new), encoding="utf-8")


class SystemExit2(Exception):
    """An error of the check itself."""


def run_tests(copy: Path, tests: tuple[str, ...]) -> tuple[bool, str, float]:
    """Whether the tests pass against a copy; the first failed test; seconds."""
    environment = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    start = time.monotonic()
    where = subprocess.run(
        [sys.executable, "-c", "import tokenswift; print(tokenswift.__file__)"],
        cwd=copy, env=environment, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if not Path(where).is_relative_to(copy):
        raise SystemExit2(f"the tests would run against {where}")
    # Fewer examples than in the suite: a defect that shows up once in a while is not the aim here.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow and not model", *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {TIMEOUT} s", time.monotonic() - start
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (0, 1) or (done.returncode == 1 and not failed):
        raise SystemExit2(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    first = failed[0].split(" ")[1].partition("::")[2] if failed else ""
    return done.returncode == 0, first, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="defects whose name contains this")
    parser.add_argument("--list", action="store_true", help="name the defects and stop")
    args = parser.parse_args()
    defects = [defect for defect in DEFECTS if args.only in defect.name]
    if args.list:
        print("\n".join(defect.name for defect in defects))
        return 0
    rows, missed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        clean = Path(folder) / "clean"
        shutil.copytree(ROOT / "src", clean, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for defect in defects:  # all replacements are checked before anything runs
            trial = Path(folder) / "trial"
            shutil.copytree(clean, trial)
            plant(defect, trial)
            shutil.rmtree(trial)
        for defect in defects:
            copy = Path(folder) / "copy"
            shutil.copytree(clean, copy)
            plant(defect, copy)
            passed, first, seconds = run_tests(copy, defect.tests)
            shutil.rmtree(copy)
            missed += passed
            rows.append((("MISSED" if passed else "caught"), defect.name, first))
            print(f"{rows[-1][0]}  {seconds:4.0f} s  {defect.name}: {first or '-'}", flush=True)
        tests = tuple(dict.fromkeys(test for defect in defects for test in defect.tests))
        passed, first, _ = run_tests(clean, tests)
        if not passed:
            raise SystemExit2(f"the tests fail without any defect: {first}")
    print(f"\n{len(rows) - missed} of {len(rows)} defects caught; without a defect the tests pass")
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SystemExit2 as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
