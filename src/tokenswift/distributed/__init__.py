"""Many texts on many machines, by Ray Data: `Generator` is an actor class for ``map_batches``.

Ray schedules, starts dead actors anew and retries their rows; what is here writes each row's text into a
run's folder, and goes on inside it where a dead actor left it. Every node needs this package, and the model.
"""

from __future__ import annotations

from tokenswift.distributed.generator import Generator, pool

__all__ = ["Generator", "pool"]
