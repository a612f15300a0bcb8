"""Options as frozen dataclasses: every field checked, every error names the field and the value.

How the next token is chosen, what counts as a loop, how a model is loaded, and what each method
takes. The command line makes its options from these fields and from what their docstrings say.
Light: no torch.
"""
