"""Proof of exactness that a user can run: tokens of every strategy against plain decoding's, logits
of passes over one row and over trees against transformers' own pass in float32, and what int8 costs
a text.
"""
