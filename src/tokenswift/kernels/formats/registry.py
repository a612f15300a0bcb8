"""The number formats by name and by GGUF's code; a new one is a file and a line here."""

from __future__ import annotations

from tokenswift.kernels.formats.q4_0 import Q4_0
from tokenswift.kernels.formats.q4_1 import Q4_1
from tokenswift.kernels.formats.q4_k import Q4_K
from tokenswift.kernels.formats.q5_k import Q5_K
from tokenswift.kernels.formats.q6_k import Q6_K
from tokenswift.kernels.formats.q8_0 import Q8_0

FORMATS = {format.name: format for format in (Q8_0, Q6_K, Q5_K, Q4_K, Q4_1, Q4_0)}
BY_CODE = {format.code: format for format in FORMATS.values()}
