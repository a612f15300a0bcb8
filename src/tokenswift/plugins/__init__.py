"""Parts of this library inside other engines."""
