"""What passes of a model must take on a machine: bytes and operations against bandwidth and arithmetic."""
