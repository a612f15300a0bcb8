"""Defects of many texts in one pass."""

from __future__ import annotations

from defects.defect import Defect

SCHEDULER = "tests/engine/test_scheduler.py"

MANY = (
    Defect(
        "many: a text's rows see another's cache",
        "engine/step.py",
        "segments.append(Segment(tokens, positions, sequence.cache, places.parents))",
        "segments.append(Segment(tokens, positions, texts[0].sequence.cache, places.parents))",
        (SCHEDULER,),
    ),
    Defect(
        "many: a beginning is taken for shared beyond where texts differ",
        "engine/prefixes.py",
        "return next(i for i in range(at, end) if one[i] != other[i])",
        "return end",
        (SCHEDULER,),
    ),
    Defect(
        "many: a row's price does not know the other texts",
        "spec/adaptive/cost.py",
        "self._of(self.fixed, rows + beside.rows)",
        "self._of(self.fixed, rows)",
        ("tests/spec/drafters/test_auto.py",),
    ),
    Defect(
        "many: a text that is alone again goes on resting",
        "spec/adaptive/recipe.py",
        "self._rests > 0 and sequence.load.rows >= control.load.rows",
        "self._rests > 0",
        ("tests/spec/drafters/test_auto.py::test_little_is_decided_beside_texts_that_make_rows_dear",),
    ),
    Defect(
        "a held plain decision looks at no match of the text",
        "spec/adaptive/recipe.py",
        "self._rested = len(free.tree) == 1",
        "self._rested = True",
        ("tests/spec/drafters/test_auto.py::test_matches_of_the_text_end_a_held_decision",),
    ),
    Defect(
        "many: a part of a prompt is committed a row short",
        "engine/step.py",
        "self.sequence.cache.commit(tuple(range(self.rows)))",
        "self.sequence.cache.commit(tuple(range(max(1, self.rows - 1))))",
        (f"{SCHEDULER}::test_parts_read_beside_a_text_leave_what_the_whole_leaves",),
    ),
    Defect(
        "many: logits go to the next text",
        "engine/step.py",
        "return list(zip(passes, logits.split([len(tree) for tree in trees]), strict=True))",
        "return list(zip(passes, logits.roll(1, 0).split([len(tree) for tree in trees]), strict=True))",
        (SCHEDULER,),
    ),
    Defect(
        "many: only the last part of a prompt says what is important",
        "engine/step.py",
        "at > len(sequence.tokens) - 1 - OBSERVED",
        "at > len(sequence.tokens) - 1",
        (SCHEDULER,),
    ),
    Defect(
        "many: a text that fails ends the others",
        "engine/step.py",
        "        except Exception as error:\n            made[i] = error\n        rows += text.rows",
        "        except Exception:\n            raise\n        rows += text.rows",
        (SCHEDULER,),
    ),
    Defect(
        "many: texts run whatever the memory holds",
        "engine/admission.py",
        "            if room < 0:",
        "            if room < -1 << 60:",
        (SCHEDULER,),
    ),
    Defect(
        "many: what a text that was cancelled has written is dropped from its folder's run",
        "engine/run.py",
        "            self.journal.add(step, pieces, self.draft_passes)",
        "            self.journal.add(step, pieces[:0], self.draft_passes)",
        (SCHEDULER,),
    ),
)
