"""Where the time of a step goes, by plain decoding and with drafts.

    python -m benchmarks.step_times MODEL [--context 1000] [--steps 100] [--out FILE]

MODEL is a GGUF file or a name of `benchmarks/models.toml`. After as many steps to warm up, some
steps are timed by the phases of the loop, and as many again by torch's profiler, which slows them
down: how long the device computes for a step, how many kernels and graphs are started, and which
operations take most time on the host. One line of JSON for each way of decoding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Protocol, cast

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import prompts
from benchmarks.common import AUTO, PLAIN
from benchmarks.fetch import model_file
from benchmarks.json_lines import publish
from benchmarks.row import commit, machine
from benchmarks.words import Measured
from tokenswift import LLM
from tokenswift.config.sampling import CONTINUED
from tokenswift.engine.stream import Prefilled
from tokenswift.turns import DecodingSide

SHOWN = 12  # operations that take most time on the host
MOST = 16  # tokens of a step for which there is room
GRAPH = "cudaGraphLaunch"
KERNEL = "cudaLaunchKernel"


def step_times(state: Prefilled, strategy: str, steps: int) -> Measured:
    """The figures of a way of decoding, from the tokens of a prompt on."""
    params = replace(CONTINUED, seed=1)
    room = 3 * steps * MOST
    stream = iter(state.stream(room, strategy, sampling=params, ignore_eos=True))
    side = DecodingSide(stream)
    for step in islice(stream, steps):  # to warm up
        side.add(step)
    timed = DecodingSide(stream)
    start = perf_counter()
    for step in islice(stream, steps):
        timed.add(step)
    wall = perf_counter() - start
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        for step in islice(stream, steps):
            side.add(step)
    # torch gives these averages their fields without declaring them
    averages = cast("Iterable[OperationAverage]", recorded.key_averages())
    return {
        "strategy": strategy,
        "steps": timed.step_count,
        "tokens_a_step": len(timed.tokens) / timed.step_count,
        "step_ms": 1e3 * wall / timed.step_count,
        "phase_ms": {
            phase: 1e3 * seconds / timed.step_count
            for phase, seconds in sorted(timed.phase_seconds.items())
        },
        **profiled(averages, steps),
    }


class OperationAverage(Protocol):
    """What torch's profiler says of all calls of an operation; times in µs.

    Attributes:
        key: the operation's name.
        count: its calls.
        self_cpu_time_total: on the host, without operations that it calls.
        self_device_time_total: on the device.
    """

    key: str
    count: int
    self_cpu_time_total: float
    self_device_time_total: float


def profiled(events: Iterable[OperationAverage], steps: int) -> Measured:
    """What torch's profiler says of so many steps.

    Args:
        events: averages by the names of operations.
    """
    by_name = {event.key: event for event in events}
    on_host = sorted(by_name.values(), key=lambda event: -event.self_cpu_time_total)
    return {
        "device_ms": sum(event.self_device_time_total for event in by_name.values()) / 1e3 / steps,
        "kernels": sum(event.count for name, event in by_name.items() if name.startswith(KERNEL))
        / steps,
        "graphs": by_name[GRAPH].count / steps if GRAPH in by_name else 0.0,
        "host_ms": {
            event.key: event.self_cpu_time_total / 1e3 / steps for event in on_host[:SHOWN]
        },
    }


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=1000, help="tokens before the text")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    return parser.parse_args()


def main() -> int:
    """Print a line of JSON for each way of decoding."""
    options = parse_options()
    file = model_file(options.model)
    llm = LLM(str(file))
    state = llm.prefill(prompts.generated("joined", llm.encode, options.context, 0))
    for strategy in (PLAIN, AUTO):
        row = {
            "model": file.stem,
            "dtype": llm.dtype,
            "context": options.context,
            **step_times(state, strategy, options.steps),
            "machine": machine(llm.device),
            "commit": commit(),
        }
        publish(row, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
