"""Benchmarks: the paper's tables and figures, rivals, other programs and the engine's parts, as
rows of JSON.

Run from a checkout as ``python -m benchmarks``; not part of the installed package.
"""
