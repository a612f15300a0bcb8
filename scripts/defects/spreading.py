"""Defects of models over several devices."""

from __future__ import annotations

from defects.defect import Defect

RANKS, PLACED = "tests/engine/test_ranks.py", "tests/models/test_placed.py"

SPREADING = (
    Defect(
        "ranks: nobody compares what was chosen",
        "engine/step.py",
        'text.ranks.agree("the tokens of a step", new)',
        "pass",
        (RANKS,),
    ),
    Defect(
        "ranks: every rank writes the text",
        "cli/main.py",
        'if hasattr(args, "tp") and own_rank():',
        "if False:",
        (RANKS,),
    ),
    Defect(
        "ranks: each has the heads of the whole model",
        "loader/placed.py",
        "    return found\n\n\ndef check_heads",
        "    return heads\n\n\ndef check_heads",
        (RANKS,),
    ),
    Defect(
        "several devices: a layer's keys are looked for in another layer's place",
        "kv/split.py",
        "        part, own = self.places[layer]\n        return part, self.parts[part], own",
        "        part, own = self.places[layer]\n        return part, self.parts[part], 0",
        ("tests/kv/test_split.py",),
    ),
    Defect(
        "several devices: a selection goes to the layers of another device",
        "kv/split.py",
        "if where == number]",
        "if where != number][: part.data.shape[0] // 2]",
        ("tests/kv/test_split.py", PLACED),
    ),
)
