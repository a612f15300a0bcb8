"""Programs that benchmarks run in processes of their own: other engines, and other checkouts of
this project.

Each is run by its path, by an interpreter and with a path of modules that the benchmark chooses, so
it imports nothing of `benchmarks`.
"""
