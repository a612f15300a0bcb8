"""Draft heads: definitions, file format, and the check against the base model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_model
from tokenswift.loader.find import HEADS
from tokenswift.loader.host import host_of
from tokenswift.loader.identity import base_of
from tokenswift.models.target import backend_for, make_target
from tokenswift.speculation.eagle.find import eagle_trained
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.files import METADATA_KEY, read_heads, save_heads
from tokenswift.speculation.heads.find import load_heads, resolve_heads
from tokenswift.speculation.heads.modules import Heads
from tokenswift.types import InputError

D = 16
V = 40


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tiny(seed: int = 0, width: int = D) -> Any:
    shape: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return tiny_model("llama", seed=seed, vocab_size=V, **shape)


def random_heads(kind: str, inner: int = 0, width: int = D) -> Heads:
    torch.manual_seed(1)
    heads = Heads(
        HeadsConfig(kind=kind, count=3, hidden_size=width, vocab_size=V, inner=inner)
    ).eval()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.requires_grad_(False)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def test_linear_heads_are_the_papers() -> None:
    heads = random_heads("linear")
    base = torch.randn(5, D)
    state = base
    for i in range(3):
        weights = {k.removeprefix(f"layers.{i}."): v for k, v in heads.state_dict().items()}
        want = state + rms(state, weights["input_layernorm.weight"]) @ weights["linear.weight"].T
        state = heads.advance(i, state, base, None)
        torch.testing.assert_close(state, want)
        torch.testing.assert_close(
            heads.normed(i, state), rms(want, weights["post_layernorm.weight"])
        )
    assert not heads.conditioned


def test_conditioned_heads_by_definition() -> None:
    heads = random_heads("conditioned", inner=8)
    assert heads.conditioned
    assert len(heads.layers) == 1
    base = torch.randn(5, D)
    embeds = torch.randn(5, D)
    w = {k.removeprefix("layers.0."): v for k, v in heads.state_dict().items()}
    state = base
    for i in range(3):
        norm = w["first_norm.weight"] if i == 0 else w["state_norm.weight"]
        parts = (
            rms(state, norm),
            rms(base, w["base_norm.weight"]),
            rms(embeds, w["embed_norm.weight"]),
        )
        x = torch.cat(parts, -1)
        inner = torch.relu(x @ w["inner.weight"].T + w["inner.bias"])
        want = x @ w["linear.weight"].T + w["linear.bias"] + inner @ w["outer.weight"].T
        state = heads.advance(i, state, base, embeds)
        torch.testing.assert_close(state, want)
    with pytest.raises(ValueError, match="embeds"):
        heads.advance(0, base, base, None)


@pytest.mark.parametrize(
    "kind,inner", [("linear", 0), ("conditioned", 8), ("conditioned", 0), ("medusa", 2)]
)
def test_file_round_trip(kind: str, inner: int, tmp_path: Path) -> None:
    model = tiny()
    heads = random_heads(kind, inner)
    save_heads(heads, tmp_path / "a.safetensors", base_of(model), {"steps": 5})
    again, base, notes = read_heads(tmp_path / "a.safetensors")
    assert again.config == heads.config
    assert notes == {"steps": 5}
    assert base.hidden_size == D
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    loaded = resolve_heads(str(tmp_path / "a.safetensors"), host_of(model))
    assert loaded is not None
    assert loaded.count == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "a.safetensors"]


def test_matrices_of_whole_blocks_are_written_in_eight_bits(tmp_path: Path) -> None:
    """They are read as what their blocks hold. Older files have bfloat16, and are read, too."""
    path = tmp_path / "a.safetensors"
    host = host_of(tiny(width=64))
    heads = random_heads("conditioned", 32, width=64)
    save_heads(heads, path, base_of(tiny(width=64)))
    tensors = load_file(path)
    again = load_heads(path, host).state_dict()
    for name, tensor in heads.state_dict().items():
        written = tensors[f"heads.{name}"]
        if tensor.ndim == 1:
            assert torch.equal(written, tensor)
            assert torch.equal(again[name], tensor)
            continue
        assert written.dtype is torch.uint8
        assert written.shape[1] == tensor.shape[1] // 32 * 34
        most = tensor.abs().unflatten(1, (-1, 32)).amax(-1, keepdim=True) / 127
        assert bool(((again[name] - tensor).unflatten(1, (-1, 32)).abs() <= 0.57 * most).all())
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    short = {f"heads.{name}": tensor.bfloat16() for name, tensor in heads.state_dict().items()}
    save_file(tensors | short, path, metadata=metadata)
    for name, tensor in load_heads(path, host).state_dict().items():
        assert torch.equal(tensor, heads.state_dict()[name].bfloat16().float())


def test_heads_trained_for_a_model_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that cannot be used are passed over, with a line each."""
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path))
    host = host_of(tiny())
    other = host_of(tiny(seed=1))
    mine = tmp_path / "drafters" / f"mine{HEADS}"
    mine.parent.mkdir()
    save_heads(random_heads("conditioned"), mine, base_of(tiny()))
    content = load_file(mine)
    mine.with_name(f"a{HEADS}").write_bytes(mine.read_bytes()[:-1])
    with safe_open(mine, framework="pt") as file:
        save_file({"x": content.pop(SAMPLE)}, mine.with_name(f"b{HEADS}"), metadata=file.metadata())
    mine.with_name("c.gguf").write_bytes(b"GGUF")
    heads = resolve_heads("auto", host)
    assert heads is not None
    assert heads.kind == "conditioned"
    assert heads.source == str(mine)
    assert resolve_heads("auto", other) is None
    assert eagle_trained(host.base, make_target(tiny())) is None
    left_out = [line.partition(" ")[0] for line in caplog.messages if "left out" in line]
    assert left_out == [f"a{HEADS}", f"b{HEADS}"] * 2 + ["c.gguf"]


def test_wrong_base_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_heads(random_heads("linear"), path, base_of(tiny(), "first-model"))
    with pytest.raises(InputError, match="first-model.*llama.*differ"):
        load_heads(path, host_of(tiny(seed=5)))
    with pytest.raises(InputError, match=r"hidden size 16.*hidden size 32"):
        load_heads(path, host_of(tiny(width=32)))
    with pytest.raises(InputError, match="hidden size 16, the model has 32"):
        resolve_heads(random_heads("linear"), host_of(tiny(width=32)))


def test_odd_widths_are_left_to_torch() -> None:
    for width, inner in ((15, 0), (D, 33)):
        heads = random_heads("conditioned", inner, width)
        assert heads.packed(backend_for(), int8=False) is heads


WEIGHT = "heads.layers.1.linear.weight"
SAMPLE = "base.sample"
#: what is done to a file's header and tensors
BAD: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "a missing tensor": (
        lambda header, tensors: tensors.pop(WEIGHT),
        "lacks the tensor layers.1.linear.weight",
    ),
    "another shape": (
        lambda header, tensors: tensors.update({WEIGHT: torch.zeros(D, D + 1)}),
        r"layers.1.linear.weight is \(16, 17\).*valid: \(16, 16\)",
    ),
    "blocks of another shape": (
        lambda header, tensors: tensors.update({WEIGHT: torch.zeros(D, 34, dtype=torch.uint8)}),
        r"layers.1.linear.weight is \(16, 32\).*valid: \(16, 16\)",
    ),
    "bytes that are no blocks": (
        lambda header, tensors: tensors.update({WEIGHT: torch.zeros(D, D, dtype=torch.uint8)}),
        r"layers.1.linear.weight is \(16, 16\) in U8",
    ),
    "not a number": (
        lambda header, tensors: tensors[WEIGHT].fill_(torch.nan),
        "layers.1.linear.weight.*not finite",
    ),
    "an infinite sample": (
        lambda header, tensors: tensors[SAMPLE].fill_(torch.inf),
        "weights differ",
    ),
    "a tensor more": (
        lambda header, tensors: tensors.update({"heads.layers.7.x": torch.ones(1)}),
        "layers.7.x",
    ),
    "no sample": (lambda header, tensors: tensors.pop(SAMPLE), "lacks tensor base.sample"),
    "a short sample": (
        lambda header, tensors: tensors.update({SAMPLE: tensors[SAMPLE][:5]}),
        "weights differ",
    ),
    "frequent tokens beyond": (
        lambda header, tensors: tensors.update({"draft.frequent": torch.tensor([V])}),
        f"{V}",
    ),
    "a version": (
        lambda header, tensors: header.update(version=99),
        "Expected `int` <= 1.*version",
    ),
    "a header": (
        lambda header, tensors: header.update(heads={"sort": "linear"}),
        "holds no draft heads",
    ),
    "a long kind": (
        lambda header, tensors: header["heads"].update(kind="x" * 10**6),
        "holds no draft heads",
    ),
    "many heads": (
        lambda header, tensors: header["heads"].update(count=1 << 40),
        "holds no draft heads",
    ),
    "a number of 10^400": (
        lambda header, tensors: header.update(calibration={"heads": [[10**400] * 6] * 2}),
        "holds no draft heads",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line_errors(name: str, tmp_path: Path) -> None:
    change, words = BAD[name]
    path = tmp_path / "a.safetensors"
    save_heads(random_heads("linear"), path, base_of(tiny()))
    with safe_open(path, framework="pt") as file:
        header = json.loads((file.metadata() or {})[METADATA_KEY])
    tensors = load_file(path)
    change(header, tensors)
    save_file(tensors, path, metadata={METADATA_KEY: json.dumps(header)})
    with pytest.raises(
        InputError, match=words if name.startswith("frequent") else f"a.safetensors.*{words}"
    ) as caught:
        load_heads(path, host_of(tiny()))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_not_a_heads_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_heads(tmp_path / "none.safetensors", host_of(tiny()))
    (tmp_path / "text").write_text("no tensors here")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load_heads(tmp_path / "text", host_of(tiny()))
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="holds no draft heads"):
        load_heads(tmp_path / "other.safetensors", host_of(tiny()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_written(tmp_path: Path, value: float) -> None:
    path = tmp_path / "a.safetensors"
    model = tiny()
    save_heads(random_heads("linear"), path, base_of(model))
    before = path.read_bytes()
    bad = random_heads("linear")
    bad.layers[1].linear.weight[2, 3] = value  # type: ignore[union-attr,index,operator]
    with pytest.raises(InputError, match=r"^[^\n]*layers.1.linear.weight.*a.safetensors$"):
        save_heads(bad, path, base_of(model))
    assert path.read_bytes() == before
    assert names(tmp_path) == ["a.safetensors"]
    model.get_input_embeddings().weight.data[:] = value
    with pytest.raises(InputError, match=r"^[^\n]*base.sample.*a.safetensors$"):
        save_heads(random_heads("linear"), path, base_of(model))


def test_headers_of_strangers_are_bounded(tmp_path: Path) -> None:
    """What a header may hold is decided before it is parsed, and read before any tensor."""
    entry = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    for count, words in (
        (400_000, "has a header of"),
        (70_000, "has 70,000 tensors; valid: up to 65,536"),
    ):
        header = ("{" + ",".join(entry % i for i in range(count)) + "}").encode()
        (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(InputError, match=f"^heads file .*{words}"):
            load_heads(tmp_path / "a", host_of(tiny()))
