"""What the controller decides on made-up times of steps: it wastes little, and follows text and
machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tokenswift.sampling.rows import Ranked
from tokenswift.speculation.calibration import Calibration
from tokenswift.speculation.control import Control
from tokenswift.speculation.costs import CostEstimate, Costs
from tokenswift.speculation.modes import PLAIN, Drafted
from tokenswift.speculation.sequence_state import ALONE, BatchLoad
from tokenswift.tree import CandidateTree

HEADS = CostEstimate("heads", tokens=1.45, rows=3, draft_cost=0.2)
DRAFT = 0.002  # plain passes that looking for candidates takes


def flat(rows: int) -> float:
    """Rows that cost little, up to where arithmetic takes over."""
    return 1 + 0.05 * (rows - 1) + 0.1 * max(0, rows - 8)


class Decoder:
    """Steps of a made-up decoder, whose clock counts plain passes of the machine when it is idle.

    Args:
        rows: what a pass takes, by its rows.
        heads: chance that the heads are right; None: there are none.
    """

    def __init__(self, rows: Callable[[int], float] = flat, heads: float | None = None) -> None:
        self.rows = rows
        self.heads = heads
        self.control = Control(Costs(), {} if heads is None else {"heads": HEADS})
        self.rnd = random.Random(0)
        self.slow = 1.0
        self.drafted: list[int] = []
        self.modes: list[str] = []

    def write(self, tokens: int, chance: float, load: BatchLoad = ALONE) -> float:
        """Write tokens of a text whose repeats are right with a chance; returns tokens a unit of
        time."""
        written = 0
        spent = 0.0
        while written < tokens:
            new, time = self._step(chance, load)
            written += new
            spent += time
        return written / spent

    def _step(self, chance: float, load: BatchLoad) -> tuple[int, float]:
        control = self.control
        tree = CandidateTree(0)
        draft = DRAFT
        mode = control.choose_mode(500, load)
        node = 0
        for token in range(0 if control.timing_plain else 31):
            node = tree.add(node, token, "ngram", chance)
        nodes, expected = tree.select(control.verify_costs(31), control.tokens_per_pass)
        rows = 1 + len(nodes)
        heads = int(mode == "heads" and control.should_ask(mode, 1 + expected, rows, chance))
        if heads:
            tree.add(0, 99, "head", self.heads or 0.0)
            draft += 0.2
            nodes, expected = tree.select(control.verify_costs(31), control.tokens_per_pass)
        rows = 1 + len(nodes)
        control.record_draft(Drafted(mode, 1 + expected, rows, passes=heads, levels=heads))
        chain = [node for node in nodes if tree.tokens[node] != 99]
        right = next((i for i in range(len(chain)) if self.rnd.random() >= chance), len(chain))
        if not right and len(chain) < len(nodes):
            right = int(self.rnd.random() < (self.heads or 0.0))
        time = self.rows(rows + load.rows)
        verify = time * self.slow * self.rnd.lognormvariate(0, 0.05)
        verify *= 20 if self.rnd.random() < 0.01 else 1  # a hiccup of the machine
        control.record_step(1 + right, rows, 30 * verify, 30 * draft * self.slow)
        self.drafted.append(len(nodes))
        self.modes.append("heads" if heads else PLAIN)
        return 1 + right, time + draft


@pytest.mark.parametrize("chance", [0.02, 0.1])
def test_the_first_tokens_are_hardly_slower_than_plain_decoding(chance: float) -> None:
    assert Decoder().write(50, chance) > 0.98
    assert Decoder(lambda rows: 0.5 + 0.5 * rows).write(50, chance) > 0.98


def test_prose_then_a_list_then_prose() -> None:
    decoder = Decoder()
    assert decoder.write(200, 0.05) > 0.98
    assert decoder.write(300, 0.97) > 4.5  # knowing it all one would make 5.6
    decoder.write(20, 0.05)
    assert decoder.write(200, 0.05) > 0.98


def test_heads_are_left_where_the_text_itself_tells_as_much() -> None:
    """In a list plain steps yield what those with heads do, and take less time."""
    decoder = Decoder(heads=0.9)
    decoder.write(1500, 0.97)
    assert decoder.modes[-100:].count("heads") < 20


def test_a_drafter_is_asked_where_that_is_worth_its_time() -> None:
    """The free drafters are judged by the steps in which they alone were asked."""
    control = Control(Costs(), {"heads": HEADS}, {"heads": 0.5})
    plain = control.modes[PLAIN]
    control.current = "heads"
    control.modes["heads"].draft_cost = 0.21
    answers = list[bool]()
    for control.tokens_per_pass, chance in ((1, 0.59), (1, 0.61), (3, 0.3)):
        answers.append(control.should_ask("heads", 1.1, 2, chance))
    assert answers == [True, False, True]
    assert control.modes["heads"].bias == 0.5  # as earlier texts showed
    for expected, bias in ((3.0, 1.0), (1.5, 1.3)):
        for _ in range(40):
            control.record_draft(Drafted("heads", expected, 4))
            control.record_step(3, 4, 33.0, 1.0)
        assert plain.bias == pytest.approx(bias, abs=0.02)
    control.timing_plain = False
    assert [control.uses(name) for name in ("heads", PLAIN, "lookup")] == [True, False, True]


def steps_of_heads(right: Callable[[int], bool]) -> list[int]:
    """The steps of 1,000 in which heads drafted, where plain steps yield 1.7 tokens, and those with
    heads 2 where they are right, by their number."""
    estimate = replace(HEADS, tokens=1.9, draft_cost=0.05, pass_cost=0.02)
    control = Control(Costs(), {"heads": estimate})
    used = list[int]()
    for step in range(1000):
        mode = control.choose_mode(500)
        tokens = 1 + (step % 10 < 7)
        if mode == "heads":
            tokens = 1 + right(len(used))
            used.append(step)
            control.should_ask(mode, 1.7, 3, 0.4)
            control.record_draft(Drafted(mode, 1.9, 3, passes=1))
        else:
            rows = 1 if control.timing_plain else 3
            tokens = min(tokens, rows)
            control.record_draft(Drafted(mode, 1.7 if rows > 1 else 1.0, rows))
        control.record_step(tokens, control.last_draft.rows, 30.0, 1.0)
    return used


def test_a_drafter_that_was_unlucky_at_first_is_tried_again() -> None:
    """In its first 8 steps, behind which its bias promises less than other drafts bring."""
    used = steps_of_heads(lambda number: number >= 8)
    assert sum(step >= 200 for step in used) > 600


def test_a_drafter_that_is_never_right_is_hardly_tried() -> None:
    assert len(steps_of_heads(lambda number: False)) < 60


def test_many_texts_and_dear_rows() -> None:
    """Beside seven texts in a pass that is bound by arithmetic only what is nearly sure is
    drafted."""
    others = BatchLoad(rows=7, tokens=7.0)
    decoder = Decoder(lambda rows: 0.2 + 0.8 * rows)
    decoder.write(200, 0.6, others)
    assert sum(decoder.drafted[50:]) < 0.1 * len(decoder.drafted[50:])
    decoder.write(300, 0.98, others)
    assert sum(decoder.drafted[-50:]) > 50


def test_rows_that_turn_out_dear_are_not_drafted() -> None:
    decoder = Decoder(lambda rows: 1 + 0.45 * (rows - 1))
    decoder.write(100, 0.3)
    assert sum(decoder.drafted[-40:]) < 10


def test_a_busy_machine_changes_no_decision() -> None:
    """Half-way every pass takes three times as long, drafting too; nothing is drafted less for
    it."""
    decoder = Decoder()
    decoder.write(400, 0.7)
    before = sum(decoder.drafted[-60:])
    decoder.slow = 3.0
    decoder.write(400, 0.7)
    assert sum(decoder.drafted[-60:]) == pytest.approx(before, rel=0.25)
    assert decoder.control.costs.unit == pytest.approx(90, rel=0.3)


@pytest.mark.parametrize("chance", [0.05, 0.9])
def test_the_reported_gain_is_the_real_one(chance: float) -> None:
    decoder = Decoder()
    decoder.write(50, chance)
    # plain decoding's rate is 1; hiccups, which are not in it, take a fifth
    rate = decoder.write(1000, chance)
    gain = decoder.control.record()["gain"]
    assert gain is not None
    assert 0.7 * rate < gain < 0.95 * rate


@pytest.mark.parametrize(("left", "tried"), [(300, False), (3000, True), (None, True)])
def test_a_cache_is_loaded_only_where_much_is_to_come(left: int | None, tried: bool) -> None:
    decoder = Decoder(heads=0.5)
    decoder.control.estimates = {"heads": replace(HEADS, loads=True)}
    decoder.control.remaining = left
    decoder.write(200, 0.02)
    assert ("heads" in decoder.modes) == tried


@pytest.mark.parametrize(("right", "least", "most"), [(0.05, 0.0, 0.02), (0.8, 0.9, 1.0)])
def test_heads_are_used_where_they_pay_and_else_rarely(
    right: float, least: float, most: float
) -> None:
    decoder = Decoder(heads=right)
    decoder.write(2000, 0.02)
    assert least <= decoder.modes[100:].count("heads") / len(decoder.modes[100:]) <= most
    assert decoder.modes[:4] == [PLAIN] * 3 + ["heads"]


@pytest.mark.parametrize("wrong", [0.8, 1.25])
def test_plain_steps_between_drafted_ones_tell_the_unit(wrong: float) -> None:
    """Rows and unit were learnt wrong by a quarter, their product right: two plain steps in 128
    mend both. Fewer rows than are known by now to be cheap are not held to be dear."""
    decoder = Decoder()
    decoder.write(600, 0.8)
    costs = decoder.control.costs
    costs.ratios[:] = [ratio * wrong for ratio in costs.ratios]
    costs.unit /= wrong
    decoder.write(6000, 0.8)
    assert costs.unit == pytest.approx(30, rel=0.06)
    assert costs.verify(4) == pytest.approx(flat(4), rel=0.06)
    costs.ratios[1] = 9.0
    costs.observe(4, 30 * flat(4))
    assert 1 <= costs.verify(2) <= costs.verify(4)


@pytest.mark.parametrize("dear", [True, False])
def test_pauses_double_until_something_is_drafted(dear: bool) -> None:
    """Steps that only time a plain pass, the first ones, and a trial of heads do not count."""
    control = Control(Costs(), {"heads": replace(HEADS, tokens=0.0)})
    pauses = list[int]()
    steps = [(PLAIN, 1)] * 30 + [(PLAIN, 2)] + [("heads", 2)] * 9 + [(PLAIN, 1)] * 11
    for mode, rows in steps:
        control.choose_mode(500)
        control.record_draft(Drafted(mode, 1.0, rows))
        control.record_step(1, rows, 30.0, 3.0 if dear else 0.03)
        pauses.append(control.pause())
    expected = [16, 32, 64, 128, 128, 16] if dear else []
    assert [pause for pause in pauses if pause] == expected


def pinned_run() -> tuple[Control, Calibration, list[float]]:
    """A controller and a calibration after steps of every kind, and the last chances of a
    ranking."""
    chances = list[float]()
    calibration = Calibration()
    ranked = Ranked([4, 5, 6], [3.0, 1.0, -9.0], [0.8, 0.1, 0.1])
    decoder = Decoder(heads=0.6)
    estimate = replace(HEADS, pass_cost=0.3, best_chance=0.4)
    control = Control(Costs(), {"heads": estimate})
    decoder.control = control
    for heads, chance, load in (
        (0.6, 0.3, 0),
        (0.1, 0.1, 0),
        (0.6, 0.5, 2),
        (0.6, 0.02, 0),
        (0.2, 0.9, 0),
    ):
        decoder.heads = heads
        decoder.write(250, chance, BatchLoad(load, 1.5 * load, 3.0 * load))
        control.record_pause(30.0, 1.0)
        control.observe_best("heads", chance)
        for right in (5, 7):
            chances, learn = calibration.chances("backbone", ranked, load)
            learn(right)
    return control, calibration, chances


def test_figures_of_control_are_pinned() -> None:
    """Other ones say that drafting takes another course, which is to be measured."""
    control, _, _ = pinned_run()
    heads = control.modes["heads"]
    costs = control.costs
    record = control.record()
    figures = {
        "tokens_per_pass": (control.tokens_per_pass, 3.13506),
        "row": (control.row_cost, 0.04643137),
        "level": (control.level_cost, 0.04916671),
        "best chance of heads": (control.best_chance("heads"), 0.3942),
        "best chance of an unseen level": (control.best_chance(0), 0.35),
        "tokens": (heads.mean_tokens, 1.392871),
        "rows": (heads.mean_rows, 2.800366),
        "draft": (heads.draft_cost, 0.2028144),
        "bias": (heads.bias, 0.7443501),
        "bias of a trial": (heads.hoped_bias(0.5), 0.7057685),
        "pass_cost": (heads.pass_cost, 0.1475001),
        "rate": (control.expected_rate("heads"), 0.9756365),
        "unit": (costs.unit, 32.12126),
        "5 rows": (costs.verify(5), 1.190862),
        "40 rows": (costs.verify(40), 4.011678),
        "gain": (record["gain"], 1.032039),
    }
    for name, (figure, pinned) in figures.items():
        assert figure == pytest.approx(pinned, rel=1e-6), name
    assert record["modes"]["plain"] == {"steps": 635, "tokens": 980, "nodes": 1005}
    costs.observe(300, 30.0)  # more rows than any that have a cost of their own
    assert record["summary"].endswith("text in 78%; heads in 22% of the steps, 2.0 nodes a step")


def test_figures_of_the_calibration_are_pinned() -> None:
    """Of a source that was learnt from, and of one that was not."""
    _, calibration, chances = pinned_run()
    assert chances == pytest.approx([0.9374508, 0.02943959, 0.0131096], rel=1e-6)
    two = Ranked([8, 9], [2.0, 1.5], [0.5, 0.3])
    one = Ranked([8], [2.0], [0.5])
    assert calibration.chances("other", one, 0)[0] == pytest.approx([0.6041652], rel=1e-6)
    assert calibration.chances("other", two, 0)[0] == pytest.approx(
        [0.3073141, 0.1483087], rel=1e-6
    )
