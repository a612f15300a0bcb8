"""Chat templates, which are programs that come with a model's files: rendered in a process with limits."""
