"""A call of the kernels past the end of a tensor, around the check of the boundary: what ASan must find."""

from __future__ import annotations

import sys
from ctypes import CDLL, c_float, c_int, c_long, c_void_p

import torch

if __name__ == "__main__":
    library = CDLL(sys.argv[1])
    library.ts_norm.argtypes = [c_void_p, c_void_p, c_void_p, c_long, c_long, c_float, c_int, c_int]
    states, weight = torch.zeros(2, 48, dtype=torch.float32), torch.zeros(48, dtype=torch.float32)
    out = torch.empty(3, 48, dtype=torch.float32)
    library.ts_norm(out.data_ptr(), states.data_ptr(), weight.data_ptr(), 3, 48, 1e-5, 0, 1)
    print("reached")
