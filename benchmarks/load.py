"""Plain decoding on a machine that others use too: all threads over one, with busy loops beside them.

Conditions take turns through one run, and so do the numbers of threads within each; a ratio is that of two
neighbours, and what is told is the median over the rounds. Before the clock runs, some tokens let the engine
find the number of threads that pays (`kernels.cpu.threads`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.prompts import prompt
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.roofline.timer import median
from tokenswift.types import InputError

#: a program that computes for as long as its parent lives, on one core where one is named
LOOP = """
import os, sys
parent, *cores = map(int, sys.argv[1:])
if cores:
    os.sched_setaffinity(0, cores)
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_loops(count: int, *core: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """While entered, so many processes only compute; they end with this process, however it ends.

    Args:
        core: the one that all of them are bound to; none: they are free.
    """
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-IS", "-c", LOOP, *map(str, (os.getpid(), *core))]
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            loops.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))
        yield loops
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def measure(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast the usual number of threads is as one, by condition.

    Raises:
        InputError: processes cannot be bound to cores here, or there is one thread anyway.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise InputError("load is measured by binding processes to cores, which this system does not do")
    usual = torch.get_num_threads()
    if usual < 2:
        raise InputError("threads is 1; valid for load: at least 2, to compare with one")
    cores = sorted(os.sched_getaffinity(0))
    ids = prompt(config["prompts"], llm.encode, 0, config["prefill"], llm.target.vocab_size).ids
    state, params = llm.prefill(ids), SamplingParams(**config["sampling"])

    def ms(tokens: int) -> float:
        done = state.generate(tokens, "autoregressive", {}, params, ignore_eos=True)
        return 1e3 / done.metrics.tokens_per_second

    conditions: dict[str, tuple[int, ...]] = {"idle": (0,), "one": (1, cores[-1]), "all": (len(cores),)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in conditions}
    order = [usual, 1]
    try:
        for _ in range(config["rounds"]):
            for name, loops in conditions.items():
                found = {}
                with busy_loops(*loops):
                    for threads in order:
                        torch.set_num_threads(threads)
                        ms(config["warm"])
                        found[threads] = ms(config["points"][-1])
                taken[name].append((found[usual], found[1]))
            order.reverse()
    finally:
        torch.set_num_threads(usual)
    figures = {}
    for name, pairs in taken.items():
        figures[f"{name}_ms"] = median([ms for ms, _ in pairs])
        figures[f"{name}_ratio"] = median([one / ms for ms, one in pairs])
    return {"cores": len(cores), "runs": config["rounds"], "figures": {str(config["points"][-1]): figures}}
