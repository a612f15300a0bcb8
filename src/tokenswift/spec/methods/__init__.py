"""Strategies: ways to draft. None of them can change the output."""
