"""Defects of EAGLE-3 drafting: they never change the text, so only tests of drafts see them."""

from __future__ import annotations

from defects.defect import Defect

_EAGLE = "tests/spec/drafters/test_eagle.py::"
SCRIPTED = _EAGLE + "test_a_scripted_drafter_is_accepted_in_full"
_ROWS = "tests/spec/drafters/test_eagle_rows.py::"
ROWS = _ROWS + "test_kernels_give_the_references_rows[kernels-{}]"
RUNS = _ROWS + "test_a_run_drafts_what_the_reference_drafts[True]"
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
        "model.run([tree.tokens[node] for node in rows]",
        "model.run([tree.tokens[tree.parents[node]] for node in rows]",
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
        "EAGLE-3: keys of branches that end stay while others go on",
        DRAFTER,
        "self.cache.commit(tuple(self._rows.index(node) for node in stays))",
        "self.cache.commit(tuple(range(len(self._rows) if stays else 0)))",
        (ROWS.format("plain"),),
    ),
    Defect(
        "EAGLE-3: branches see each other's keys",
        DRAFTER,
        "parents = [place.get(node, -1) for node in above]",
        "parents = [row - 1 for row in range(len(rows))]",
        (RUNS,),
    ),
    Defect(
        "EAGLE-3: all branches go on from the first one's state",
        DRAFTER,
        "torch.cat([made[node] for node in above])",
        "torch.cat([made[above[0]] for node in above])",
        (ROWS.format("plain"),),
    ),
    Defect(
        "EAGLE-3: drafted rows are a position late",
        DRAFTER,
        "at = self.at + tree.depths[self._trunk] + 1",
        "at = self.at + tree.depths[self._trunk] + 2",
        (RUNS,),
    ),
    Defect(
        "EAGLE-3: all drafted rows start from the last feature",
        DRAFTER,
        "above = [tree.parents[node] for node in rows]",
        "above = [0 for node in rows]",
        (SCRIPTED,),
    ),
    Defect(
        "EAGLE-3: columns of the drafter's vocabulary are read as token ids",
        DRAFTER,
        "candidates.spread(branches.logits, self.model.subset,",
        "candidates.spread(branches.logits, None,",
        (SCRIPTED,),
    ),
    Defect(
        "EAGLE-3: only the best branch goes on",
        "spec/adaptive/candidates.py",
        "other for other in others if other[0] * known.lead > least",
        "other for other in others[:0]",
        (_EAGLE + "test_trees_accept_more_than_chains",),
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
