"""Where the time of a step goes: the rows, and what is read from torch's profiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.step_times import profiled, step_times
from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tokenswift import LLM


@dataclass
class Average:
    """In place of what torch's profiler says of an operation."""

    key: str
    count: int
    self_cpu_time_total: float
    self_device_time_total: float


def test_a_row_has_the_phases_of_a_step() -> None:
    llm = LLM.from_model(tiny_model("qwen2", max_position_embeddings=512), chat_tokenizer())
    row: dict[str, Any] = step_times(llm.prefill("Once upon a time"), "autoregressive", 5)
    assert row["steps"] == 5
    assert row["tokens_a_step"] == 1
    assert 0 < sum(row["phase_ms"].values()) <= row["step_ms"]
    assert row["graphs"] == 0
    assert row["host_ms"]


def test_figures_of_the_profiler_are_of_one_step() -> None:
    events = [
        Average("cudaGraphLaunch", 4, 100.0, 0.0),
        Average("cudaLaunchKernel", 40, 400.0, 0.0),
        Average("cudaLaunchKernelExC", 2, 10.0, 0.0),
        Average("attend", 8, 0.0, 6000.0),
    ]
    assert profiled(events, steps=2) == {
        "device_ms": 3.0,
        "kernels": 21.0,
        "graphs": 2.0,
        "host_ms": {
            "cudaLaunchKernel": 0.2,
            "cudaGraphLaunch": 0.05,
            "cudaLaunchKernelExC": 0.005,
            "attend": 0.0,
        },
    }
