"""One way of reading safetensors files, whole tensors or some rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenswift.loader.safetensors_file import SafetensorsFile

STATES = torch.arange(15, dtype=torch.bfloat16).view(5, 3)


@pytest.fixture
def file(tmp_path: Path) -> SafetensorsFile:
    path = tmp_path / "states.safetensors"
    tokens = torch.arange(5, dtype=torch.int32)  # 20 bytes: the states do not begin at 8 of them
    save_file({"tokens": tokens, "states": STATES, "empty": torch.zeros(0, 3)}, path)
    return SafetensorsFile(path)


@pytest.mark.parametrize("first, last", [(0, 5), (1, 4), (4, 9), (2, 2), (7, 9)])
def test_some_rows_are_those_of_the_tensor(file: SafetensorsFile, first: int, last: int) -> None:
    assert torch.equal(file.rows("states", first, last), STATES[first:last])


def test_a_tensor_without_numbers_is_read(file: SafetensorsFile) -> None:
    assert file.read("empty").shape == (0, 3)
