"""What training computes: the teacher against the sampler."""

from __future__ import annotations

from tokenswift.config import SamplingParams

SAMPLERS = [
    SamplingParams(min_p=0.0, repetition_penalty=1.0),
    SamplingParams(penalty_window=7),
    SamplingParams(min_p=0.0, top_p=0.6, temperature=0.7, penalty_window=30),
    SamplingParams(min_p=0.0, top_k=5, repetition_penalty=1.5, penalty_window=1),
    SamplingParams(min_p=0.0, eta_cutoff=0.02, repetition_penalty=1.1, penalty_window=11),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.05, eta_cutoff=0.001),
    SamplingParams(greedy=True),
]
