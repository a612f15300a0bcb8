"""The report of a run: one HTML page that needs nothing else."""
