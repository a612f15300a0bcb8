"""The kernels of a model's layers, compiled at load several at a time: no first pass waits for one after the
other. A few passes start all of them; what else differs between passes is no form of its own.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from tokenswift.interfaces import Segment
from tokenswift.json_files import line_of
from tokenswift.kernels.base import Body
from tokenswift.kernels.cuda.plan import ALONE, RECORDED
from tokenswift.kernels.weights import LayerWeights

logger = logging.getLogger("tokenswift")
ROWS = (1, RECORDED[-1], ALONE + 1)  # of the passes: few, as many as are recorded, and a prompt's


@torch.inference_mode()
def prepare(backend: Any, body: Body) -> None:
    """Compile what passes of a body start.

    Args:
        backend: a `CudaBackend` whose kernels are compiled while they would be started.
    """
    ops, shape = backend.ops, body.shape
    layers = different(body.weights)
    enough, ops.enough = ops.enough, 1
    try:
        with ops.compiling():
            for rows in ROWS:
                cache = backend.new_cache(len(layers), shape.kv_heads, shape.width, 2 * rows, shape.keys)
                numbers = torch.arange(rows)
                batch = backend.batch([Segment(numbers, numbers, cache)], shape)
                count = len(batch.tokens)
                states = torch.zeros(count, shape.hidden, dtype=torch.float32, device=backend.device)
                turns = torch.zeros(count, shape.width // 2, dtype=torch.float32, device=backend.device)
                backend.layers(Body(shape, layers), states, turns, turns, batch, keep=False)
                backend.linear(states.to(shape.weights), layers[0].qkv)  # as the LM head is multiplied with
                ops.move(cache.data, 0, [1])
    except Exception as error:  # of Triton or its compiler; the first pass finds out what is really wrong
        logger.warning("a model's kernels are compiled one after the other here (%s)", line_of(error))
    finally:
        ops.enough = enough


def different(weights: list[LayerWeights]) -> list[LayerWeights]:
    """The layers whose kernels differ: the first, whose norm adds nothing, the second, and those of others'
    formats or vectors."""
    chosen: list[LayerWeights] = []
    seen: set[tuple[Any, ...]] = set()
    for number, layer in enumerate(weights):
        form = _form(layer)
        if number < 2 or form not in seen:
            chosen.append(layer)
        seen.add(form)
    return chosen


def _form(layer: LayerWeights) -> tuple[Any, ...]:
    """What kernels of a layer depend on."""
    parts = [(part.format and part.format.name, part.rows) for one in layer.packed() for part in one.parts]
    there = (layer.qkv_bias, layer.out_bias, layer.gate_up_bias, layer.down_bias, layer.query_norm)
    return (*parts, *(one is None for one in there))
