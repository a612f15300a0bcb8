"""Defects of the CUDA backend that its tests without a card have to catch."""

from __future__ import annotations

from defects.defect import Defect

BACKEND, CHOOSE = "tests/kernels/cuda/test_backend.py", "tests/kernels/cuda/test_choose.py"
DRAFTS = f"{BACKEND}::test_drafts_that_are_waited_for_together_are_those_of_single_waits"
INTERPRETER = "tests/kernels/cuda/test_interpreter.py"
FUSED = f"{INTERPRETER}::test_layers_in_few_launches_in_the_interpreter"

CUDA = [
    Defect(
        "a branch's keys at their slots, not by the row's path, on CUDA",
        "kernels/cuda/attention_kernels.py",
        "        slot = tl.where(turned, before + node, place)\n",
        "        slot = place\n",
        (INTERPRETER,),
    ),
    Defect(
        "a shared chunk left out on CUDA",
        "kernels/cuda/attention_kernels.py",
        "tl.minimum(low + span, closed), tl.minimum",
        "tl.minimum(low + span, closed - 1), tl.minimum",
        (INTERPRETER,),
    ),
    Defect(
        "CUDA: a row does not see its own key",
        "kernels/cuda/attention_kernels.py",
        "place[None, :] <= here[:, None]",
        "place[None, :] < here[:, None]",
        (INTERPRETER,),
    ),
    Defect(
        "CUDA: a window is a key too short",
        "kernels/cuda/attention_kernels.py",
        "place[None, :] >= oldest[:, None]",
        "place[None, :] > oldest[:, None]",
        (INTERPRETER,),
    ),
    Defect(
        "CUDA: two spans are merged in the wrong order",
        "kernels/cuda/attention_kernels.py",
        "        total, top, whole = merged(total, top, whole, x1, p1, s1)\n"
        "        total, top, whole = merged(total, top, whole, x2, p2, s2)\n",
        "        total, top, whole = merged(total, top, whole, x2, p2, s2)\n"
        "        total, top, whole = merged(total, top, whole, x1, p1, s1)\n",
        (INTERPRETER,),
    ),
    Defect(
        "CUDA: a prompt's rows leave out their last span",
        "kernels/cuda/attention_kernels.py",
        "(high + SPAN - 1) // SPAN",
        "high // SPAN",
        (INTERPRETER,),
    ),
    Defect(
        "CUDA: a tree of many rows is read as a long chain",
        "kernels/cuda/plan.py",
        "all(segment.parents is None and len(segment.tokens) > ALONE",
        "all(len(segment.tokens) > ALONE",
        ("tests/kernels/cuda/test_reference.py",),
    ),
    Defect(
        "CUDA: kernels of prompts are not compiled at load",
        "kernels/cuda/prepare.py",
        "ROWS = (1, RECORDED[-1], ALONE + 1)",
        "ROWS = (1, RECORDED[-1])",
        ("tests/kernels/cuda/test_forms.py",),
    ),
    Defect(
        "CUDA: kernels are tried on a card that is too old",
        "kernels/cuda/check.py",
        "if capability < CAPABLE:",
        "if capability[0] < 7:",
        ("tests/kernels/cuda/test_check.py",),
    ),
    Defect(
        "roofline: a pass without graphs stands in the table of recorded ones",
        "roofline/reckoned.py",
        ' or not row.get("graphs")',
        "",
        ("tests/roofline/test_reckoned.py",),
    ),
    Defect(
        "CUDA: rows that only fill up a recorded pass are kept",
        "kernels/cuda/plan.py",
        "[[*where, -1, 0, 1, 0]]",
        "[[*where, 0, 0, 1, 0]]",
        (INTERPRETER,),
    ),
    Defect(
        "CUDA: a recorded pass goes on with the numbers of its first call",
        "kernels/cuda/graphs.py",
        "            buffer[: len(each)].copy_(each, non_blocking=True)\n",
        "            if not buffer.any():\n                buffer[: len(each)].copy_(each)\n",
        (BACKEND,),
    ),
    Defect(
        "CUDA: numbers are sent in a way that waits for the card",
        "kv/pages.py",
        "non_blocking=True",
        "non_blocking=False",
        (BACKEND,),
    ),
    Defect(
        "CUDA: the penalty's window is a token too long",
        "kernels/cuda/choose.py",
        "over = window - len(tail) + max",
        "over = window - len(tail) - 1 + max",
        (CHOOSE,),
    ),
    Defect(
        "CUDA: all rows of a ranking have the first one's noise",
        "kernels/cuda/choose.py",
        "[which]",
        "[which * 0]",
        (CHOOSE,),
    ),
    Defect(
        "CUDA: rows of a ranking are added up as many together as there are",
        "kernels/cuda/choose.py",
        "for part in scores.split(TOGETHER)])\n    parts",
        "for part in scores.split(len(scores))])\n    parts",
        (CHOOSE,),
    ),
    Defect(
        "CUDA: tokens that are still on the card are unknown to the penalty",
        "kernels/cuda/choose.py",
        "after.copy_(filled(after, later))",
        "after.clamp_(min=0)",
        (DRAFTS,),
    ),
    Defect(
        "CUDA: a refused row on the way is chosen from",
        "spec/accept.py",
        "            raise found\n",
        "            return 0\n",
        (CHOOSE,),
    ),
    Defect(
        "CUDA: a level of heads is waited for by itself",
        "spec/drafters/heads.py",
        "self.refusals, later=True)",
        "self.refusals)",
        (f"{BACKEND}::test_a_step_waits_for_the_device_once",),
    ),
    Defect(
        "CUDA: the check at loading has no states for rows that fill up a pass",
        "kernels/case.py",
        "len(batch.tokens) - count)",
        "0)",
        (BACKEND,),
    ),
    Defect(
        "CUDA: a pass with fewer states than rows runs",
        "kernels/cuda/backend.py",
        "if not len(states) == len(cos)",
        "if False and not len(states) == len(cos)",
        ("tests/kernels/cuda/test_check.py",),
    ),
    Defect(
        "CUDA: attention of many rows that has other bits is used",
        "kernels/cuda/check.py",
        "            backend.ops.enough = NEVER\n",
        "            pass\n",
        ("tests/kernels/cuda/test_check.py",),
    ),
    Defect(
        "CUDA: passes of an EAGLE-3 drafter are waited for one by one",
        "spec/drafters/candidates.py",
        "subset, kind, None, True, True)\n            nodes = ",
        "subset, kind, None, False, True)\n            nodes = ",
        (f"{BACKEND}::test_a_step_waits_for_the_device_once",),
    ),
    Defect(
        "CUDA: tokens that a draft model ran before they were known are not told to it",
        "spec/drafters/model.py",
        "[named(token) for token in self._drafted]",
        "[token for token in self._drafted]",
        (BACKEND,),
    ),
    Defect(
        "CUDA: nodes are kept by their numbers in the tree, not by their rows of the pass",
        "engine/step.py",
        "kept = tuple(row_of[node] for node in nodes)",
        "kept = nodes",
        (BACKEND,),
    ),
    Defect(
        "CUDA: a layer in few launches: sums of parts without the last one's",
        "kernels/cuda/fused_kernels.py",
        "for part in range(tl.num_programs(2)):",
        "for part in range(tl.num_programs(2) - 1):",
        (FUSED,),
    ),
    Defect(
        "CUDA: a layer in few launches: counts are left as they are",
        "kernels/cuda/fused_kernels.py",
        "            tl.store(count, 0)  # for the next product\n",
        "",
        (FUSED,),
    ),
    Defect(
        "CUDA: a layer in few launches: squares of the rows before the product",
        "kernels/cuda/fused_kernels.py",
        "        x = tl.where(inside, x, 0.0)\n",
        "        x = tl.load(into + 0 * m[:, None] + n[None, :], mask=inside, other=0.0)\n",
        (FUSED,),
    ),
    Defect(
        "CUDA: a layer in few launches that has other bits is used",
        "kernels/cuda/check.py",
        'else "they have other bits"',
        'else ""',
        ("tests/kernels/cuda/test_check.py",),
    ),
]
