"""Parts that strategies draft with: chains, head trees, and the sparse context of
self-speculation."""
