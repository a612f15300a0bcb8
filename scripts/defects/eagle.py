"""Defects of EAGLE-3 drafting: they never change the text, so only tests of drafts see them."""

from __future__ import annotations

from defects.defect import Defect

_EAGLE = "tests/spec/drafters/test_eagle.py::"
SCRIPTED = _EAGLE + "test_a_scripted_drafter_is_accepted_in_full"
ROWS = _EAGLE + "test_kernels_give_the_references_rows[kernels-{}]"
RUNS = _EAGLE + "test_a_run_drafts_what_the_reference_drafts[True]"
FEATURES = _EAGLE + "test_features_are_the_states_between_layers[kernels]"
DRAFTER, MODEL = "spec/drafters/eagle.py", "spec/eagle/packed.py"

EAGLE = [
    Defect(
        "EAGLE-3: a row has the feature of the token before",
        DRAFTER,
        "model.fuse(features[:, rows])",
        "model.fuse(features.roll(1, 1)[:, rows])",
        (SCRIPTED,),
    ),
    Defect(
        "EAGLE-3: a row has the embedding of its own token",
        DRAFTER,
        "sequence.tokens[at + rows.start + 1 : at + rows.stop + 1]",
        "sequence.tokens[at + rows.start : at + rows.stop]",
        (SCRIPTED,),
    ),
    Defect(
        "EAGLE-3: a drafted row has the embedding of the token before",
        DRAFTER,
        "[path[len(made) - 1]]",
        "[path[max(0, len(made) - 2)]]",
        (SCRIPTED,),
    ),
    Defect(
        "EAGLE-3: features of a step are those of its first rows",
        "engine/step.py",
        "index_select(1, to_device(kept, result.features.device))",
        "narrow(1, 0, len(kept))",
        (RUNS,),
    ),
    Defect(
        "EAGLE-3: features of the prompt are a chunk's last ones",
        "models/base.py",
        "features.take(cache.length, result.features)",
        "features.take(cache.length, result.features.flip(1))",
        (RUNS,),
    ),
    Defect(
        "EAGLE-3: the window is a key wider",
        MODEL,
        "            window=self.window,",
        "            window=self.window + 1,",
        (RUNS,),
    ),
    Defect(
        "EAGLE-3: where the window moves it loses a key",
        DRAFTER,
        "cache.slide(model.window)",
        "cache.slide(model.window - 2)",
        (RUNS,),
    ),
    Defect(
        "EAGLE-3: keys of a rejected branch stay",
        DRAFTER,
        "        cache.rewind(read)",
        "        pass",
        (RUNS,),
    ),
    Defect(
        "EAGLE-3: drafted rows are a position late",
        DRAFTER,
        "at = newest + len(made)",
        "at = newest + len(made) + 1",
        (RUNS,),
    ),
    Defect(
        "EAGLE-3: all drafted rows start from the last feature",
        DRAFTER,
        "model.fed_back(made[-1])",
        "model.fed_back(made[0])",
        (SCRIPTED,),
    ),
    Defect(
        "EAGLE-3: columns of the drafter's vocabulary are read as token ids",
        DRAFTER,
        "candidates.chain(run, model.subset,",
        "candidates.chain(run, None,",
        (SCRIPTED,),
    ),
    Defect(
        "EAGLE-3: what is fed back is never normed",
        MODEL,
        "        if not self.config.norm_output:",
        "        if self.config:",
        (ROWS.format("3.1"),),
    ),
    Defect(
        "EAGLE-3: the residual is never normed",
        "kernels/cpu/cpu.c",
        "w->norm ? m->eps : -1, type",
        "m->eps, type",
        (ROWS.format("names"),),
    ),
    Defect(
        "EAGLE-3: a tap is a layer late",
        "kernels/cpu/cpu.c",
        "        tap(p, l, m->hidden);",
        "        tap(p, l + 1, m->hidden);",
        (FEATURES,),
    ),
    Defect(
        "EAGLE-3: a store of features keeps the oldest",
        "spec/eagle/features.py",
        "            del self._parts[0]",
        "            del self._parts[-1]",
        (_EAGLE + "test_features_are_kept_for_the_newest_tokens",),
    ),
    Defect(
        "EAGLE-3: a drafter that was right once is reported all the same",
        MODEL,
        "            self._said = True  # it is this target's",
        "            pass",
        (_EAGLE + "test_a_drafter_of_another_model_is_reported_once",),
    ),
]
