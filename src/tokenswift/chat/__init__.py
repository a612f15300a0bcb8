"""Tool calls: what may be called, how a family of models writes calls, and what was written."""
