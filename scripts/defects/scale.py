"""Defects of many texts on many machines."""

from __future__ import annotations

from defects.defect import Defect

ACTOR = "tests/distributed/test_generator.py"
CLUSTER = "tests/distributed/test_cluster.py"

SCALE = (
    Defect(
        "scale: a row's own settings give way to the command's",
        "engine/records.py",
        "settings = {**call, **self.more,",
        "settings = {**self.more, **call,",
        (ACTOR,),
    ),
    Defect(
        "scale: a chat is sampled as a text",
        "distributed/generator.py",
        "usual = self._answers if is_chat(one.prompt) else self._sampling",
        "usual = self._sampling",
        (ACTOR,),
    ),
    Defect(
        "scale: a folder that another actor writes fails its row at once",
        "distributed/generator.py",
        "if time.monotonic() > end:",
        "if time.monotonic() > end - PATIENCE:",
        (ACTOR,),
    ),
    Defect(
        "scale: an older copy of a journal takes the place of a newer one",
        "runs/remote.py",
        "if data and _tokens(data) >= _tokens_here(here):",
        "if data:",
        (ACTOR,),
    ),
    Defect(
        "scale: a journal that grows is copied once",
        "runs/remote.py",
        "if size > copied:",
        "if not copied:",
        (ACTOR,),
    ),
    Defect(
        "scale: a finished text is not copied",
        "runs/remote.py",
        "self._copy(name, path.name)",
        "pass",
        (ACTOR,),
    ),
    Defect(
        "scale: a folder without locks between nodes is taken",
        "distributed/cluster.py",
        "if names and locks and not is_address(probe) and not folders.is_locked(Path(path)):",
        "if False:",
        (CLUSTER,),
    ),
    Defect(
        "scale: what another node wrote is not looked at",
        "distributed/cluster.py",
        'if not fs.exists(f"{path}/{name}") or fs.cat_file(f"{path}/{name}") != name.encode():',
        "if False:",
        (CLUSTER,),
    ),
    Defect(
        "scale: a text taken up by another actor is counted twice",
        "distributed/generator.py",
        "total = begun.known\n",
        "total = 0\n",
        (ACTOR,),
    ),
    Defect(
        "scale: a plan forgets that one text may take longest",
        "roofline/forecast.py",
        "seconds = max(sum(each) / gain / nodes, max(each) * max(1.0, at_once / gain))",
        "seconds = sum(each) / gain / nodes",
        ("tests/roofline/test_forecast.py",),
    ),
)
