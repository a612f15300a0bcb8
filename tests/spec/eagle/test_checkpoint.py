"""EAGLE-3 checkpoints: the forms give one drafter; what fits no target, or is none, is refused in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import eagles
from tokenswift.spec.eagle.checkpoint import EagleWeights, load_eagle
from tokenswift.spec.eagle.config import EagleConfig
from tokenswift.spec.eagle.reference import EagleCache, EagleReference
from tokenswift.types import InputError

CONFIG = eagles.config(norm_before_residual=True)
FOUND, IDS = eagles.tensors(CONFIG), eagles.ids(CONFIG)
OFFSETS = IDS - torch.arange(len(IDS))
LISTED = torch.zeros(CONFIG.vocab, dtype=torch.bool)
LISTED[IDS] = True
MAPS = {"d2t": OFFSETS, "t2d": LISTED}


def same(got: EagleWeights, config: EagleConfig = CONFIG) -> None:
    assert got.config == config
    assert got.d2t is not None and got.d2t.tolist() == IDS.tolist()
    assert got.tensors.keys() == FOUND.keys()
    for name, tensor in FOUND.items():
        torch.testing.assert_close(got.tensors[name], tensor, atol=0, rtol=0)


def test_all_forms_give_one_drafter(tmp_path: Path) -> None:
    target = eagles.target()
    same(load_eagle(eagles.write(tmp_path / "research", CONFIG, FOUND, MAPS), target))
    folder = eagles.write(tmp_path / "speculators", CONFIG, FOUND, MAPS, speculators=True)
    same(load_eagle(folder, target))
    words = [f"t{number}" for number in range(90)]
    file = eagles.write_gguf(tmp_path / "drafter.gguf", CONFIG, FOUND, IDS)
    same(load_eagle(file, target, words))
    with pytest.raises(InputError, match="another tokenizer: its token 7 is 't7', the model's is 'x'"):
        load_eagle(file, target, [*words[:7], "x"])
    named = {f"model.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    torch.save(named, tmp_path / "research" / "pytorch_model.bin")
    (tmp_path / "research" / "model.safetensors").unlink()
    same(load_eagle(tmp_path / "research", target))


@pytest.mark.parametrize(
    "maps",
    [
        {"d2t": OFFSETS},
        {"d2t": IDS, "t2d": LISTED},
        {"d2t": torch.zeros_like(IDS), "t2d": LISTED},
        {"t2d": LISTED.to(torch.uint8)},
        {"d2t": IDS.flip(0).int()},
        {"d2t": OFFSETS, "t2d": torch.zeros_like(LISTED)},
    ],
    ids=["offsets", "ids", "zeros", "t2d alone", "falling ids", "t2d never filled"],
)
def test_maps_of_the_vocabulary(maps: dict[str, Any], tmp_path: Path) -> None:
    falling = "d2t" in maps and maps["d2t"].dtype == torch.int32
    found = FOUND | {"lm_head": FOUND["lm_head"].flip(0)} if falling else FOUND
    same(load_eagle(eagles.write(tmp_path, CONFIG, found, maps), eagles.target()))


def test_without_a_map_all_tokens_are_drafted(tmp_path: Path) -> None:
    config = eagles.config(draft_vocab=90)
    found = eagles.tensors(config)
    for said in ("absent", 90):
        got = load_eagle(eagles.write(tmp_path, config, found, draft_vocab_size=said), eagles.target())
        assert got.d2t is None and got.config.draft_vocab == 90


@torch.no_grad()
def test_embedding_and_head_of_the_target(tmp_path: Path) -> None:
    """A checkpoint without them drafts as one that holds the target's."""
    shared = {name: value for name, value in FOUND.items() if name not in ("embed", "lm_head")}
    head = torch.randn(90, 32)
    got = load_eagle(eagles.write(tmp_path / "a", CONFIG, shared, MAPS), eagles.target())
    full = FOUND | {"lm_head": head[IDS]}
    want = load_eagle(eagles.write(tmp_path / "b", CONFIG, full, MAPS), eagles.target())
    tokens, features = torch.arange(9), torch.randn(9, 32)

    def logits(of: EagleWeights) -> torch.Tensor:
        return EagleReference(of, FOUND["embed"], head).step(tokens, features, tokens, EagleCache())[1]

    assert torch.equal(logits(got), logits(want))


def test_what_a_config_leaves_out(tmp_path: Path) -> None:
    target = eagles.target(rope_parameters={"rope_type": "default", "rope_theta": 7e5})

    def read(**said: Any) -> EagleConfig:
        return load_eagle(eagles.write(tmp_path, CONFIG, FOUND, MAPS, **said), target).config

    assert read(rope_theta=None).rope["rope_theta"] == 7e5  # the target's
    assert read(rope_theta="absent").rope["rope_theta"] == 10000.0
    assert read(eagle_aux_hidden_state_layer_ids=[0, 6, 8]).feature_layers == (0, 6, 8)
    assert read(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}).feature_layers == (2, 4, 5)
    assert read().window is None and read().default_window == 256
    assert read(sliding_window=64, layer_types=["sliding_attention"]).default_window == 64
    assert read(sliding_window=64, layer_types=["full_attention"]).window is None


def bad(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return FOUND | {name: value}


NAN = FOUND["down"].clone()
NAN[3, 3] = torch.nan
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "wider target": ({}, {}, {"hidden_size": 64}, "hidden size 32, the model has 64"),
    "more tokens": ({}, {}, {"vocab_size": 91}, "vocabulary 90, the model has 91"),
    "wide draft": (
        {"target_hidden_size": 64},
        {name: value for name, value in FOUND.items() if name != "embed"},
        {"hidden_size": 64},
        "no embed of its own and hidden size 32, the model has 64",
    ),
    "picture": ({}, {}, {"num_hidden_layers": None}, "kind llama, whose config has no num_hidden_layers"),
    "shallow target": ({}, {}, {"num_hidden_layers": 6}, "the target has 6; valid: a target with 7"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, {}, {}, r"is \[2, 4, 9\].*from 0 to 8"),
    "two layers": ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, {}, {}, "3 different layers"),
    "deep": ({"num_hidden_layers": 2}, {}, {}, "num_hidden_layers is 2; valid: 1"),
    "huge": ({"hidden_size": 1 << 40}, {}, {}, "hidden_size is 1099511627776; valid: an integer from 1"),
    "no size": ({"intermediate_size": "x"}, {}, {}, "intermediate_size is 'x'"),
    "odd head": ({"head_dim": 7}, {}, {}, "head_dim is 7; valid: an even number"),
    "other layer": ({"hidden_act": "gelu"}, {}, {}, "hidden_act is 'gelu'; valid: silu"),
    "flag": ({"norm_output": "yes"}, {}, {}, "norm_output is 'yes'; valid: true or false"),
    "positions": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}, {}, "rope_scaling is"),
    "draft size": (
        {"draft_vocab_size": 41},
        {},
        {},
        r"d2t has shape \(40,\); valid: \(41,\)",
    ),
    "not finite": (
        {},
        bad("down", NAN),
        {},
        "midlayer.mlp.down_proj.weight holds values that are not finite",
    ),
    "type": ({}, bad("o", FOUND["o"].long()), {}, "o_proj.weight has the type I64; valid: F32, BF16, F16"),
    "shape": ({}, bad("q", FOUND["q"][:8]), {}, r"q_proj.weight has shape \(8, 64\); valid: \(32, 64\)"),
    "unknown": ({}, bad("layers.1.q", torch.ones(2)), {}, "layers.1.q is none of such a drafter's"),
    "missing": (
        {},
        {k: v for k, v in FOUND.items() if k != "up"},
        {},
        "lacks the tensor midlayer.mlp.up_proj",
    ),
    "eagle-1": (
        {},
        {"fc": torch.ones(32, 64), "q": FOUND["q"][:, :32]},
        {},
        "is an EAGLE-1 or EAGLE-2 checkpoint, which is not supported; valid: an EAGLE-3 drafter of one layer",
    ),
    "eagle-1 by name": ({"speculators_model_type": "eagle"}, {}, {}, "is an EAGLE-1 or EAGLE-2 checkpoint"),
    "p-eagle by a flag": ({"parallel_drafting": True}, {}, {}, "is a P-EAGLE checkpoint"),
    "dflash by its part": ({"dflash_config": {}}, {"embed": FOUND["embed"]}, {}, "is a DFlash checkpoint"),
    "medusa": ({"architectures": ["MedusaModel"]}, {"embed": FOUND["embed"]}, {}, "is a Medusa checkpoint"),
    "model": ({}, {"embed": FOUND["embed"]}, {}, "has no tensor fc.weight: it is not such a drafter"),
    "p-eagle": (
        {"speculators_model_type": "peagle"},
        {},
        {},
        "is a P-EAGLE checkpoint, which is not supported",
    ),
    "p-eagle 2": ({}, bad("mask_hidden", torch.ones(1, 32)), {}, "is a P-EAGLE checkpoint"),
    "dflash": ({"architectures": ["DFlashDraftModel"]}, {}, {}, "is a DFlash checkpoint, which is not"),
    "other": ({"speculators_model_type": "new"}, {}, {}, "is a 'new' checkpoint, which is not supported"),
    "last layer": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        {},
        {},
        "drafts from the last layer alone",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    said, found, target, message = REFUSED[case]
    folder = eagles.write(tmp_path, CONFIG, found or FOUND, MAPS, **said)
    with pytest.raises(InputError, match=message) as error:
        load_eagle(folder, eagles.target(**target))
    assert "\n" not in str(error.value) and "valid:" in str(error.value) or "not finite" in message


@pytest.mark.parametrize(
    "maps,message",
    [
        ({"d2t": OFFSETS + 90}, "d2t does not give 40 different tokens from 0 to 89"),
        ({"d2t": OFFSETS - 1000, "t2d": LISTED}, "d2t does not give 40 different tokens"),
        ({"d2t": OFFSETS[:3]}, r"d2t has shape \(3,\); valid: \(40,\)"),
        ({"d2t": OFFSETS.float()}, "d2t has the type F32; valid: I64, I32"),
        ({"t2d": LISTED.roll(1), "d2t": OFFSETS}, "d2t and t2d name different tokens"),
        ({"t2d": torch.ones_like(LISTED)}, "t2d names 90 tokens; valid: 40"),
        ({"d2t": torch.zeros_like(OFFSETS)}, "does not say which 40 of 90 tokens it drafts"),
        ({}, "does not say which 40 of 90 tokens it drafts"),
    ],
)
def test_hostile_maps(maps: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_eagle(eagles.write(tmp_path, CONFIG, FOUND, maps), eagles.target())


def test_broken_files(tmp_path: Path) -> None:
    target = eagles.target()
    with pytest.raises(InputError, match="has no config.json and is not a GGUF file"):
        load_eagle(tmp_path / "nothing", target)
    folder = eagles.write(tmp_path / "a", CONFIG, FOUND, MAPS)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load_eagle(folder, target)
    file.unlink()
    torch.save({"fc.weight": CONFIG}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="pytorch_model.bin cannot be read as weights"):
        load_eagle(folder, target)
    (folder / "config.json").write_text(json.dumps([]))
    with pytest.raises(InputError, match="config.json cannot be used"):
        load_eagle(folder, target)


OTHER_KINDS = {
    "eagle": "is an EAGLE-1 or EAGLE-2 checkpoint, which is not supported",
    "dflash": "is a DFlash checkpoint, which is not supported",
    "llama": "has the architecture 'llama'; valid: eagle3",
}


def test_broken_gguf_files(tmp_path: Path) -> None:
    target, file = eagles.target(), tmp_path / "drafter.gguf"
    eagles.write_gguf(file, CONFIG, FOUND, IDS, block_count=2)
    with pytest.raises(InputError, match="block_count is 2; valid: 1"):
        load_eagle(file, target)
    eagles.write_gguf(file, CONFIG, FOUND, IDS + 80)
    with pytest.raises(InputError, match="d2t does not give 40 different tokens"):
        load_eagle(file, target)
    eagles.write_gguf(file, CONFIG, FOUND, IDS, embedding_length=1 << 30)
    with pytest.raises(InputError, match="eagle3.embedding_length is 1073741824"):
        load_eagle(file, target)
    nan = FOUND | {"down": NAN}
    with pytest.raises(InputError, match="ffn_down.weight holds values that are not finite"):
        load_eagle(eagles.write_gguf(tmp_path / "nan.gguf", CONFIG, nan, IDS), target)
    for kind, line in OTHER_KINDS.items():
        with pytest.raises(InputError, match=line):
            load_eagle(eagles.write_gguf(tmp_path / f"{kind}.gguf", CONFIG, FOUND, IDS, kind), target)
    file.write_bytes(file.read_bytes()[:-99])
    with pytest.raises(InputError, match="ends before the end of tensor"):
        load_eagle(file, target)


def test_two_of_a_tensor(tmp_path: Path) -> None:
    folder = eagles.write(tmp_path, CONFIG, FOUND, MAPS)
    file = folder / "model.safetensors"
    found = load_file(file)
    save_file(found | {"layers.0.hidden_norm.weight": torch.ones(32)}, file)
    with pytest.raises(InputError, match="has two tensors"):
        load_eagle(folder, eagles.target())
