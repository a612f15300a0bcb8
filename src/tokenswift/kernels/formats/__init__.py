"""Number formats of weights: one file each, and how the CPU kernels read them."""
