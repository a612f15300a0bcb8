"""Known defects, planted one at a time by mutations.py: the tests named with each have to fail."""

from __future__ import annotations

from defects.adjusting import ADJUSTING
from defects.audit import AUDIT
from defects.auto import AUTOMATIC
from defects.caches import CACHES
from defects.cuda import CUDA
from defects.defect import Defect
from defects.drafting import DRAFTING
from defects.eagle import EAGLE
from defects.exactness import EXACTNESS
from defects.grammars import GRAMMARS
from defects.int8 import INT8
from defects.low_bit import LOW_BIT
from defects.many import MANY
from defects.measuring import MEASURING
from defects.scale import SCALE
from defects.serving import SERVING
from defects.spreading import SPREADING
from defects.training import TRAINING

__all__ = ["DEFECTS", "Defect"]

DEFECTS = [
    *(*EXACTNESS, *ADJUSTING, *AUDIT, *DRAFTING, *GRAMMARS, *AUTOMATIC, *LOW_BIT, *INT8, *CUDA),
    *(*EAGLE, *MANY, *CACHES, *SCALE, *SERVING, *SPREADING, *TRAINING, *MEASURING),
]
