"""gpt-oss in folders: experts in blocks of MXFP4, or unpacked as transformers saves them; what its
configs say; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.conftest import tiny_tokenizer
from tests.tiny import build
from tokenswift import LLM
from tokenswift.config.loading import Dtype, Weights
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.formats import MXFP4, Stored
from tokenswift.loader.config import ModelConfig, completed
from tokenswift.loader.experts import microscaled, split_entries
from tokenswift.loader.layout import layout_of
from tokenswift.loader.tensors import Entry
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.source import FromFiles
from tokenswift.types import InputError

pytestmark = pytest.mark.usefixtures("own_cache")

YARN: dict[str, object] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
#: a config as the hub has it, of a small model
PUBLISHED: dict[str, object] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 257,
    "experts_per_token": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "output_router_logits": False,
    "pad_token_id": 257,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 260,
}
TOKENS = torch.arange(2, 40)


def model_of_sizes() -> PreTrainedModel:
    """A random model of transformers, with the sizes of the config."""
    ours = {"quantization_config", "architectures", "model_type", "rope_scaling", "rope_theta"}
    fields = {name: value for name, value in PUBLISHED.items() if name not in ours}
    fields["rope_parameters"] = {**YARN, "rope_theta": 150000.0}
    return build("gpt_oss", fields, initializer_range=0.2)


def in_blocks(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices (E, N, K) in MXFP4 as the hub has them: numbers, scales, and the very values."""
    rows = values.flatten(0, 1)
    stored = gguf.quantize(rows.numpy(), gguf.GGMLQuantizationType.MXFP4)
    unpacked = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.MXFP4))
    by_block = torch.from_numpy(stored).unflatten(-1, (-1, MXFP4.nbytes))
    halves = by_block[..., 1:]
    places = torch.cat((halves & 15, halves >> 4), -1)  # each number of a block by itself
    numbers = places[..., ::2] | places[..., 1::2] << 4
    shape = values.shape[:2]
    return (
        numbers.unflatten(0, shape).contiguous(),
        by_block[..., 0].unflatten(0, shape).contiguous(),
        unpacked.view_as(values),
    )


Save = Callable[..., tuple[Path, PreTrainedModel]]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Saves a model with experts in MXFP4 or unpacked; returns the folder, and transformers' own
    model of the same values."""

    def saved(blocks: bool = True, **changes: object) -> tuple[Path, PreTrainedModel]:
        model = model_of_sizes()
        tensors: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if name.endswith("_proj") and ".experts." in name:
                numbers, scales, values = in_blocks(parameter.data.mT.contiguous())
                parameter.data = values.mT.contiguous()
                if blocks:
                    tensors[f"{name}_blocks"] = numbers
                    tensors[f"{name}_scales"] = scales
                    continue
            tensors[name] = parameter.data.bfloat16().contiguous()
            parameter.data = tensors[name].float()
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        config = dict(PUBLISHED)
        if not blocks:
            del config["quantization_config"]
        config.update(changes)
        (tmp_path / "config.json").write_text(json.dumps(config))
        tiny_tokenizer().save_pretrained(tmp_path)
        return tmp_path, model

    return saved


def opened(folder: Path, dtype: Dtype = "float32", weights: Weights = "stored") -> LLM:
    return LLM(folder, dtype=dtype, weights=weights, device="cpu", heads="none")


def logits_of(llm: LLM) -> Tensor:
    cache = llm.target.new_cache(len(TOKENS))
    return llm.target.logits(llm.target.forward(TOKENS, torch.arange(len(TOKENS)), cache).hidden)


@pytest.mark.parametrize("blocks", [True, False], ids=["MXFP4", "unpacked"])
def test_a_folder_gives_the_logits_of_transformers(save: Save, blocks: bool) -> None:
    folder, model = save(blocks)
    llm = opened(folder)
    assert isinstance(llm.source, FromFiles)
    assert isinstance(llm.target, NativeTarget)
    with torch.inference_mode():
        expected = model(input_ids=TOKENS[None], use_cache=False).logits[0]
    assert torch.allclose(logits_of(llm), expected, rtol=1e-4, atol=1e-4)


def test_experts_stay_in_their_four_bits(save: Save) -> None:
    llm = opened(save()[0])
    assert isinstance(llm.target, NativeTarget)
    experts = llm.target.body.weights[0].experts
    assert experts is not None
    assert {part.format for weight in experts.packed() for part in weight.parts} == {MXFP4}


def test_blocks_and_unpacked_numbers_give_the_same_bits(save: Save) -> None:
    states = [logits_of(opened(save(blocks)[0])) for blocks in (True, False)]
    assert torch.equal(*states)


@pytest.mark.parametrize("weights", ["q8_0", "q4_0"])
def test_other_weights_are_quantized_and_experts_stay(save: Save, weights: Weights) -> None:
    llm = opened(save()[0], weights=weights, dtype="int8")
    assert isinstance(llm.target, NativeTarget)
    assert llm.target.int8
    experts = llm.target.body.weights[0].experts
    assert experts is not None
    assert {part.format for weight in experts.packed() for part in weight.parts} == {MXFP4}
    assert logits_of(llm).isfinite().all()


def test_the_type_is_that_of_the_tensors_where_a_config_names_none(save: Save) -> None:
    assert opened(save()[0], dtype="auto").target.dtype == torch.bfloat16


def test_transformers_model_of_a_folder_has_its_values(save: Save) -> None:
    folder, model = save(blocks=False)
    loaded = opened(folder).model
    for (name, values), (other, expected) in zip(
        loaded.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(values, expected)


def test_numbers_of_a_block_are_put_where_gguf_has_them() -> None:
    values = torch.tensor([0.5, -6.0, 3.0, 1.0] * 16).view(1, 1, 64) * 2.0**-7
    numbers, scales, unpacked = in_blocks(values)
    assert torch.equal(unpacked, values)
    assert torch.equal(microscaled(numbers[0], scales[0]).decode(), values[0])


def test_every_scale_and_number_is_read_exactly(kernels: CpuBackend) -> None:
    exponents = torch.arange(249, dtype=torch.uint8)
    numbers = torch.arange(0, 256, dtype=torch.uint8).view(16, 16).repeat_interleave(16, 0)[:249]
    stored = microscaled(numbers[:, None], exponents[:, None])
    taken = kernels.take(kernels.pack(stored), torch.arange(249))
    assert torch.equal(taken, stored.decode())
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((table, -table)).double()
    places = torch.stack((numbers & 15, numbers >> 4), -1).flatten(1).long()
    expected = table[places] * 2.0 ** (exponents.double()[:, None] - 127)
    assert torch.equal(stored.decode().double(), expected)


# ---- what a config says --------------------------------------------------------------------------


def config_of(**changes: object) -> ModelConfig:
    config = completed("gpt_oss", {**PUBLISHED, **changes})
    assert config is not None
    return config


def test_a_published_config_is_read() -> None:
    layout = layout_of(config_of())
    assert layout.windows == (128, 0)
    assert layout.gate_limit == 7.0
    assert layout.gate_slope == 1.702
    assert layout.mixture is not None
    assert layout.mixture.biased
    assert layout.mixture.renormalised
    assert "model.layers.1.self_attn.sinks" in layout.shapes()


def test_positions_are_the_familys_where_a_config_says_none() -> None:
    rope = config_of(rope_scaling=None, rope_theta=None).rope_parameters
    assert rope == {**YARN, "rope_theta": 150000.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "another"}},
        {"hidden_act": "gelu"},
        {"swiglu_offset": 2.0},
    ],
)
def test_what_is_not_known_is_left_to_transformers(changes: Mapping[str, object]) -> None:
    assert completed("gpt_oss", {**PUBLISHED, **changes}) is None


@pytest.mark.parametrize("value", [0.0, -7.0, None, "seven"])
def test_a_limit_of_gates_is_a_positive_number(save: Save, value: object) -> None:
    folder, _ = save(swiglu_limit=value)
    with pytest.raises(InputError, match="swiglu_limit is"):
        opened(folder)


# ---- files from strangers ------------------------------------------------------------------------


def change_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Rewrite a tensor of a folder; None: leave it out."""
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, path, {"format": "pt"})


LAYER = "model.layers.1."
EXPERTS = f"{LAYER}mlp.experts."
HOSTILE: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "fewer experts": (
        f"{EXPERTS}gate_up_proj_blocks",
        lambda values: values[:3],
        r"gate_up_proj_blocks is \(3, 192, 2, 16\) in U8; valid: \(4, 192, 2, 16\) in U8",
    ),
    "fewer scales": (
        f"{EXPERTS}down_proj_scales",
        lambda values: values[..., :2],
        r"down_proj_scales is \(4, 64, 2\) in U8; valid: \(4, 64, 3\) in U8",
    ),
    "blocks of floats": (
        f"{EXPERTS}down_proj_blocks",
        lambda values: values.float(),
        r"down_proj_blocks is \(4, 64, 3, 16\) in F32; valid: \(4, 64, 3, 16\) in U8",
    ),
    "a bias that is too short": (
        f"{EXPERTS}gate_up_proj_bias",
        lambda values: values[:, :-2],
        r"gate_up_proj_bias is \(4, 190\) in BF16; valid: \(4, 192\)",
    ),
    "sinks of other heads": (
        f"{LAYER}self_attn.sinks",
        lambda values: values[:2],
        r"sinks is \(2,\) in BF16; valid: \(4,\) in BF16",
    ),
    "a router's bias of other experts": (
        f"{LAYER}mlp.router.bias",
        lambda values: values[:3],
        r"router.bias is \(3,\) in BF16; valid: \(4,\) in BF16",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_tensors_of_other_shapes_are_refused_before_they_are_read(save: Save, name: str) -> None:
    tensor, change, message = HOSTILE[name]
    folder, _ = save()
    change_tensor(folder, tensor, change)
    with pytest.raises(InputError, match=message) as raised:
        opened(folder)
    assert "\n" not in str(raised.value)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    layout = layout_of(config_of(intermediate_size=80))
    names = [f"{EXPERTS}down_proj{end}" for end in ("_blocks", "_scales")]
    entries = {name: Entry(name, (4, 64, 2), "U8", lambda: torch.zeros(0)) for name in names}
    with pytest.raises(InputError, match="holds rows of 80 numbers in blocks; valid: rows of a"):
        split_entries(entries, layout, "a folder")


def test_blocks_of_another_family_are_not_read_as_its_own(save: Save) -> None:
    assert Stored(MXFP4, torch.zeros(3, 34, dtype=torch.uint8)).shape == (3, 64)
    folder, _ = save()
    config = json.loads((folder / "config.json").read_text())
    for field in ("quantization_config", "swiglu_limit", "layer_types", "head_dim"):
        config.pop(field, None)
    config.update({"model_type": "mixtral", "rope_scaling": None, "attention_bias": None})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError):
        opened(folder)
