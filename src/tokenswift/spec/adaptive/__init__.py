"""Adaptive drafting: chances of candidates, prices of passes, and what to draft from in every step."""
