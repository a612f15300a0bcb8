"""Proof of exactness that a user can run: token equality, near-ties, the distribution, the published rule."""
