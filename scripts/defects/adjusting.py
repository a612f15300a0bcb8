"""Defects of penalties, DRY, biases and what may not come: no text changes, or only deep in a tree."""

from __future__ import annotations

from defects.defect import Defect

SAMPLING, LOSSLESS = "tests/sampling/test_adjust.py", "tests/lossless/test_adjust.py"
C = "kernels/cpu/cpu_adjust.h"

ADJUSTING = (
    Defect(
        "adjusting: a drafted path is not seen in C",
        C,
        "        a->text[a->text_size + i] = path[i];\n",
        "",
        (SAMPLING,),
    ),
    Defect(
        "adjusting: the window of counted tokens is the root's in C",
        C,
        "from = position - a->window;",
        "from = a->text_size - a->window;",
        (SAMPLING,),
    ),
    Defect(
        "adjusting: the prompt is counted",
        "engine/run.py",
        "len(self.prompt), ends)",
        "0, ends)",
        (f"{LOSSLESS}::test_the_law_of_all_of_them",),
    ),
    Defect(
        "adjusting: a text that was changed is not read anew",
        "sampling/adjust.py",
        "        if not grown or self._array[max(0, known - 8) : known].tolist() != "
        "tokens[max(0, known - 8) : known]:\n",
        "        if not grown:\n",
        (f"{SAMPLING}::test_a_long_repetition_and_one_text_after_another",),
    ),
    Defect(
        "adjusting: DRY penalises breakers in C",
        C,
        "if (n < a->allowed || a->breakers[next]) continue;",
        "if (n < a->allowed) continue;",
        (SAMPLING,),
    ),
    Defect(
        "adjusting: DRY takes the newest repetition, not the longest, in C",
        C,
        "if (c->numbers[at] < n) c->numbers[at] = (int32_t)n;",
        "c->numbers[at] = (int32_t)n;",
        (SAMPLING,),
    ),
    Defect(
        "adjusting: a run that stopped by its tokens goes on when it is taken up",
        "runs/state.py",
        "        if any(self.tokens[-len(ids) :] == ids for ids in stops):\n",
        "        if False:\n",
        (f"{LOSSLESS}::test_a_run_is_taken_up_with_its_settings",),
    ),
)
