"""Draft heads. Every kind is known to `modules.Heads`."""
