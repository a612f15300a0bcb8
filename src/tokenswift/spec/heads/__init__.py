"""Draft heads. Importing the package makes every kind known to `modules.Heads`."""

from tokenswift.spec.heads import conditioned, linear, medusa

__all__ = ["conditioned", "linear", "medusa"]
