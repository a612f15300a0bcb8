"""Figures of a server for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from tokenswift.types import Step

disable_created_metrics()
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
STEP_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Measures:
    """Counts steps, tokens and answers; asks the scheduler for the rest when it is looked at.

    Args:
        scheduler: an `engine.scheduler.Scheduler`.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._registry = registry = CollectorRegistry(auto_describe=True)
        self._tokens = Counter("tokenswift_tokens", "New tokens", registry=registry)
        self._drafted = Counter(
            "tokenswift_drafted_tokens", "Drafted tokens that were checked", registry=registry
        )
        self._accepted = Counter(
            "tokenswift_accepted_tokens", "Drafted tokens that were accepted", registry=registry
        )
        self._seconds = Histogram(
            "tokenswift_step_seconds", "Time of a step of one text", buckets=STEP_SECONDS, registry=registry
        )
        self._lengths = Histogram(
            "tokenswift_step_tokens",
            "Tokens of a step: the mean is the acceptance length",
            buckets=STEP_TOKENS,
            registry=registry,
        )
        self._answers = Counter("tokenswift_answers", "Answers by end", ("kind", "state"), registry=registry)
        self._requests = Counter("tokenswift_requests", "Requests by status", ("status",), registry=registry)
        registry.register(self)  # type: ignore[arg-type]

    def step(self, step: Step) -> None:
        """Count a step."""
        self._tokens.inc(len(step.token_ids))
        self._drafted.inc(step.drafted)
        self._accepted.inc(step.accepted)
        self._seconds.observe(step.seconds)
        self._lengths.observe(len(step.token_ids))

    def answer(self, kind: str, state: str) -> None:
        """Count an answer that is as whole as it gets."""
        self._answers.labels(kind, state).inc()

    def request(self, status: int) -> None:
        """Count a request."""
        self._requests.labels(status).inc()

    def collect(self) -> Iterator[Metric]:
        """What is looked up when it is asked for."""
        now = self._scheduler.figures()
        yield GaugeMetricFamily("tokenswift_running_texts", "Texts being written", now.running)
        yield GaugeMetricFamily("tokenswift_reading_texts", "Texts whose prompts are read", now.reading)
        yield GaugeMetricFamily("tokenswift_waiting_texts", "Texts that wait for their turn", now.waiting)
        yield GaugeMetricFamily("tokenswift_pass_rows", "Rows of the newest pass", now.rows)
        memory = psutil.Process().memory_info().rss
        yield GaugeMetricFamily("tokenswift_memory_bytes", "Memory that the process holds", memory)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)
