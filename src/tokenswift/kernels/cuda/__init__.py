"""The CUDA backend: Triton kernels, and products by cuBLAS or Triton, each with one order of sums."""
