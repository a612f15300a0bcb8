"""EAGLE-3 checkpoints: the forms give one drafter; what fits no target, or is none, is refused in a
line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import eagles
from tokenswift.speculation.eagle.config import EagleConfig, EagleWeights
from tokenswift.speculation.eagle.files import load_eagle
from tokenswift.types import InputError

CONFIG = eagles.config(norm_before_residual=True)
TENSORS = eagles.tensors(CONFIG)
IDS = eagles.ids(CONFIG)
OFFSETS = IDS - torch.arange(len(IDS))
LISTED = torch.zeros(CONFIG.vocab, dtype=torch.bool)
LISTED[IDS] = True
MAPS = {"d2t": OFFSETS, "t2d": LISTED}


def check_same(weights: EagleWeights, config: EagleConfig = CONFIG) -> None:
    assert weights.config == config
    assert weights.d2t is not None
    assert weights.d2t.tolist() == IDS.tolist()
    assert weights.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        torch.testing.assert_close(weights.tensors[name], tensor, atol=0, rtol=0)


def test_all_forms_give_one_drafter(tmp_path: Path) -> None:
    target = eagles.target()
    check_same(load_eagle(eagles.write(tmp_path / "research", CONFIG, TENSORS, MAPS), target))
    folder = eagles.write(tmp_path / "speculators", CONFIG, TENSORS, MAPS, speculators=True)
    check_same(load_eagle(folder, target))
    check_same(
        load_eagle(eagles.write_gguf(tmp_path / "drafter.gguf", CONFIG, TENSORS, IDS), target)
    )
    named = {
        f"model.{name}": value for name, value in load_file(folder / "model.safetensors").items()
    }
    torch.save(named, tmp_path / "research" / "pytorch_model.bin")
    (tmp_path / "research" / "model.safetensors").unlink()
    check_same(load_eagle(tmp_path / "research", target))


def test_without_a_map_all_tokens_are_drafted(tmp_path: Path) -> None:
    config = eagles.config(draft_vocab=90)
    tensors = eagles.tensors(config)
    for maps in ({}, {"d2t": torch.zeros(90, dtype=torch.long)}):
        weights = load_eagle(eagles.write(tmp_path, config, tensors, maps), eagles.target())
        assert weights.d2t is None
        assert weights.config.draft_vocab == 90


def bad(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return TENSORS | {name: value}


NAN = TENSORS["down"].clone()
NAN[3, 3] = torch.nan
Changes = dict[str, Any]
REFUSED: dict[str, tuple[Changes, Changes, Changes, str]] = {
    "wider target": ({}, {}, {"hidden_size": 64}, r"fc.weight is \(32, 96\) .*valid: \(32, 192\)"),
    "more tokens": ({}, {}, {"vocab_size": 91}, "vocab_size is 90; valid: 91"),
    "shallow target": ({}, {}, {"num_hidden_layers": 6}, "valid: 3 different layers, from 0 to 6"),
    "layers": (
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
        {},
        {},
        r"is \[2, 4, 9\].*from 0 to 8",
    ),
    "no layers": (
        {"eagle_aux_hidden_state_layer_ids": 2},
        {},
        {},
        "layer_ids is 2; valid: 3 different",
    ),
    "deep": ({"num_hidden_layers": 2}, {}, {}, "num_hidden_layers is 2; valid: 1"),
    "huge": (
        {"hidden_size": 1 << 40},
        {},
        {},
        "hidden_size is 1099511627776; valid: int <= 262144",
    ),
    "odd heads": (
        {"head_dim": None, "hidden_size": 12},
        {},
        {},
        "hidden_size is 12; valid: an even width",
    ),
    "odd layer": (
        {"intermediate_size": 47},
        {},
        {},
        "intermediate_size is 47; valid: an even number",
    ),
    "other layer": ({"hidden_act": "gelu"}, {}, {}, "hidden_act is 'gelu'; valid: silu"),
    "not finite": (
        {},
        bad("down", NAN),
        {},
        "mlp.down_proj.weight holds values that are not finite",
    ),
    "type": (
        {},
        bad("o", TENSORS["o"].long()),
        {},
        r"o_proj.weight is .* in I64; valid: .* in BF16, F16, F32",
    ),
    "shape": (
        {},
        bad("q", TENSORS["q"][:8]),
        {},
        r"q_proj.weight is \(8, 64\) in F32; valid: \(32, 64\)",
    ),
    "missing": (
        {},
        {k: v for k, v in TENSORS.items() if k != "up"},
        {},
        "lacks the tensor up; valid: ",
    ),
    "one more": ({}, bad("x", TENSORS["q"].clone()), {}, "tensor x is .*valid: a file without it"),
    "half a part": ({}, bad("fc_norm.1", torch.ones(32)), {}, "lacks the tensor fc_norm.0"),
    "model": ({}, {"embed": TENSORS["embed"]}, {}, "lacks the tensor fc; valid: "),
    "p-eagle": (
        {"speculators_model_type": "peagle"},
        {},
        {},
        "_model_type is 'peagle'; valid: eagle3",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    fields, tensors, target, message = REFUSED[case]
    folder = eagles.write(tmp_path, CONFIG, tensors or TENSORS, MAPS, **fields)
    with pytest.raises(InputError, match=message) as error:
        load_eagle(folder, eagles.target(**target))
    assert "\n" not in str(error.value)
    assert "valid:" in str(error.value) or "not finite" in message


@pytest.mark.parametrize(
    "maps,message",
    [
        ({"d2t": OFFSETS + 90}, "does not name 40 different tokens below 90"),
        ({"d2t": OFFSETS * 0 - torch.arange(40)}, "does not name 40 different tokens below 90"),
        ({"d2t": OFFSETS[:3]}, r"lm_head.weight is \(40, 32\) in F32; valid: \(3, 32\)"),
        ({"d2t": OFFSETS[None]}, r"the shape of d2t is \(1, 40\); valid: a list of tokens"),
        ({}, r"lm_head.weight is \(40, 32\) in F32; valid: \(90, 32\)"),
    ],
)
def test_hostile_maps(maps: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_eagle(eagles.write(tmp_path, CONFIG, TENSORS, maps), eagles.target())


def test_a_gguf_file_has_ids(tmp_path: Path) -> None:
    for kind, ids, message in (
        ("eagle3", OFFSETS, "d2t does not name 40"),
        ("llama", IDS, "architecture"),
    ):
        file = eagles.write_gguf(tmp_path / "drafter.gguf", CONFIG, TENSORS, ids, kind)
        with pytest.raises(InputError, match=message):
            load_eagle(file, eagles.target())


def test_broken_files(tmp_path: Path) -> None:
    target = eagles.target()
    with pytest.raises(InputError, match="has no config.json and is not a GGUF file"):
        load_eagle(tmp_path / "nothing", target)
    folder = eagles.write(tmp_path / "a", CONFIG, TENSORS, MAPS)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load_eagle(folder, target)
    file.unlink()
    torch.save({"fc.weight": torch.ones(1).expand(2**20, 2**20)}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="lacks the tensor fc;"):  # four bytes, no terabyte
        load_eagle(folder, target)
    torch.save({"fc.weight": CONFIG}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="pytorch_model.bin cannot be read as weights"):
        load_eagle(folder, target)
    (folder / "config.json").write_text(json.dumps([]))
    with pytest.raises(InputError, match="config.json cannot be used"):
        load_eagle(folder, target)
