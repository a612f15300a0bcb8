"""What takes long to load: imported once, by the process that is forked for each run."""

import pytest  # noqa: F401
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast  # noqa: F401

import tokenswift.cli.main
import tokenswift.engine.llm
import tokenswift.loader.load  # noqa: F401
from tokenswift.models.target import backend_for

torch.set_num_threads(1)
backend_for()
