"""What makes a run survive: its journal, its folder, and what is looked at ahead of it and during
it."""
