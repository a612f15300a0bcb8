"""Defects of automatic drafting and of the choice rule in C."""

from __future__ import annotations

from defects.defect import Defect

AUTO, PARTS = "tests/spec/drafters/test_auto.py", "tests/spec/drafters/test_parts.py"
CHOOSE = "tests/sampling/test_choose.py"
RESUME = "tests/runs/test_resume.py::test_"

AUTOMATIC = (
    Defect(
        "C choice: the penalty window does not slide",
        "kernels/cpu/cpu_choose.h",
        "start = drop < r->tail_size ? drop : r->tail_size;",
        "start = 0;",
        (CHOOSE,),
    ),
    Defect(
        "C choice: noise that could win is not made",
        "kernels/cpu/cpu_choose.h",
        "if (behind > 0.6932f *",
        "if (behind > 0.3f *",
        (CHOOSE,),
    ),
    Defect(
        "C choice: eta brings back what min-p dropped",
        "kernels/cpu/cpu_choose.h",
        "if (at > cut) count = survivors(scores, r->size, at, kept);",
        "count = survivors(scores, r->size, at, kept);",
        (CHOOSE,),
    ),
    Defect(
        "C choice: a subset's tokens are its columns",
        "kernels/cpu/cpu_choose.h",
        "const int32_t id = r->ids ? r->ids[kept[i]] : kept[i];",
        "const int32_t id = kept[i];",
        (CHOOSE,),
    ),
    Defect(
        "auto: a cache is loaded for a text that ends at once",
        "spec/adaptive/controller.py",
        "return saved * self.left > _REPAID * price",
        "return saved > 0",
        (AUTO,),
    ),
    Defect(
        "auto: what loading takes is not learnt",
        "spec/adaptive/controller.py",
        "mode.load_ms = max(0.0, draft_ms - mode.draft_ms)",
        "mode.load_ms = None",
        (AUTO,),
    ),
    Defect(
        "auto: the price of a plain step is hardly ever looked at",
        "spec/adaptive/controller.py",
        "return _BEGINNING if close and",
        "return _BASELINE if close and",
        (AUTO,),
    ),
    Defect(
        "auto: expectations are believed for ever",
        "spec/adaptive/controller.py",
        "self.judged = max(drafted, min(_MEMORY, self.judged + drafted))",
        "self.judged = 1e9",
        (AUTO,),
    ),
    Defect(
        "auto: the rows of a mode are rounded",
        "spec/adaptive/controller.py",
        "part = mode.rows - rows",
        "part = 0",
        (AUTO,),
    ),
    Defect(
        "a partial cache takes every head's rows from the first",
        "kv/sparse.py",
        "rows, count = (places + first).flatten(), places.shape[1]",
        "rows, count = places.flatten(), places.shape[1]",
        ("tests/kv/test_cache.py",),
    ),
    Defect(
        "auto: chances learn from the token before",
        "spec/adaptive/candidates.py",
        "            return new[depth]",
        "            return new[depth - 1]",
        (AUTO,),
    ),
    Defect(
        "auto: heads after a partial pass start from the verified state",
        "spec/drafters/partial.py",
        'grow(candidates, nodes, states[candidates.tree.depths[nodes[0]]], "after")',
        'grow(candidates, nodes, newest_hidden(sequence), "after")',
        (AUTO,),
    ),
    Defect(
        "auto: a chain of partial passes keeps its position",
        "spec/drafters/partial.py",
        "torch.tensor([start + len(path)])",
        "torch.tensor([start])",
        (AUTO,),
    ),
    Defect(
        "auto: a node's chance forgets its parent's",
        "tree.py",
        "chances.append(chances[parent] * given)",
        "chances.append(given)",
        (PARTS,),
    ),
    Defect(
        "auto: a match goes on one token late",
        "spec/drafters/lookup.py",
        "place = best + i % (end - best)",
        "place = best + (i + 1) % (end - best)",
        (PARTS,),
    ),
    Defect(
        "auto: a token that differs ends a match",
        "spec/drafters/lookup.py",
        "_ASTRAY = 3 ",
        "_ASTRAY = 1 ",
        (PARTS,),
    ),
    Defect(
        "auto: what was new is not doubted",
        "spec/drafters/lookup.py",
        "self._new.append(not hit)",
        "self._new.append(False)",
        (PARTS,),
    ),
    Defect(
        "auto: a draft model does not catch up",
        "spec/drafters/model.py",
        "            self.row(part, ())\n            self.observe(part)",
        "            self._known = len(part) - 1",
        ("tests/spec/drafters/test_models.py",),
    ),
    Defect(
        "auto: a draft model's pass forgets the path",
        "spec/drafters/model.py",
        "lambda path: context.row(text, path)",
        "lambda path: context.row(text, path[:-1])",
        (AUTO,),
    ),
    Defect(
        "auto: a mode that does not pay is kept",
        "spec/adaptive/controller.py",
        "        if better and self._stay < 0:",
        "        if better and self._stay < -(10**9):",
        (AUTO,),
    ),
    Defect(
        "auto: one outlier sets the price",
        "spec/adaptive/cost.py",
        "scale = statistics.median([",
        "scale = statistics.mean([",
        (PARTS,),
    ),
    Defect(
        "auto: a slow machine makes dear what ran meanwhile",
        "spec/adaptive/cost.py",
        "append(ratio / scale)",
        "append(ratio)",
        (PARTS,),
    ),
    Defect(
        "packed heads: the base state is the first draft's",
        "spec/drafters/heads.py",
        "        self._base = base\n",
        "        self._base = self._base if len(self._base) else base\n",
        ("tests/spec/drafters/test_heads.py",),
    ),
    Defect(
        "journal: automatic drafting by its earlier name is the paper's method",
        "engine/resume.py",
        '        strategy = "auto"\n',
        "        pass\n",
        (RESUME + "a_run_of_automatic_drafting_by_its_old_name",),
    ),
    Defect(
        "journal: the paper's method does not say its tree",
        "engine/journal.py",
        'given["tree"] = request.options.tree',
        "pass",
        (RESUME + "a_run_of_the_papers_method",),
    ),
)
