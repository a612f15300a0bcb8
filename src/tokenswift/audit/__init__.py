"""Proof of exactness that a user can run: token equality, logits, the distribution."""
