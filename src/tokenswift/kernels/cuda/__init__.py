"""The CUDA backend: three Triton kernels and attention, products by cuBLASLt, and whole passes as
graphs."""
