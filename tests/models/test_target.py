"""Our passes (prefill, step, tree) against transformers' eager logits, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.families import FAST, rare
from tests.kernels.cuda.cases import backend_on_cpu
from tests.tiny import FAMILIES, RECURRENT, VOCAB, add_levels, tiny_model
from tokenswift import LLM, InputError
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cpu import check as cpu_check
from tokenswift.kernels.cuda import check
from tokenswift.loader.rope import rotary_of
from tokenswift.models import target as targets
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.generic import GenericTarget
from tokenswift.models.target import backend_for, make_target
from tokenswift.tree import CandidateTree

TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
WAYS = ("native", "native without compiled kernels", "generic")


def _target(way: str, model: Any) -> Any:
    if way == "generic":
        if model.config.rope_parameters.get("rope_type") == "longrope":
            pytest.skip("transformers' own forward changes these positions from pass to pass")
        if model.config.model_type in [kind for kind, _ in RECURRENT.values()]:
            pytest.skip("its states are the native decoder's alone")
        return GenericTarget(model, backend_for(), rotary_of(model))
    return NativeTarget(model, backend_for() if way == "native" else Backend(), rotary_of(model))


def _text(length: int, seed: int = 1) -> list[int]:
    return torch.randint(
        2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def _eager(model, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def test_positions_go_to_the_backends_device() -> None:
    """Those that are computed from a config are on the CPU at first."""
    model = tiny_model("gemma3")
    rotary = rotary_of(model)
    assert rotary.frequencies is not None
    assert rotary.frequencies.device.type == "cpu"
    moved = GenericTarget(model.to("meta"), Backend("meta"), rotary).rotary
    assert moved.frequencies is not None
    assert moved.frequencies.device.type == "meta"


def lengths(usual: int, *others: int) -> list[object]:
    """Families and lengths: in the fast suite all of the one, and each length of some of the
    other."""
    cases = [(family, length) for length in (usual, *others) for family in FAMILIES]
    return [case if case[1] == usual or case[0] in FAST else rare(*case) for case in cases]


@pytest.mark.parametrize(("family", "length"), lengths(37, 1, 300))
@pytest.mark.parametrize("way", WAYS)
def test_prefill_then_steps_equal_eager(
    family: str, way: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        NativeTarget, "prefill_chunk", 270
    )  # two chunks, and two chunks of attention's keys
    model = tiny_model(family)
    target = _target(way, model)
    tokens = _text(length + 4)
    expected = _eager(model, tokens)
    cache = target.new_cache(length + 10, is_long=target.rotary.is_long(length + 4))
    result = target.prefill(tokens[:length], cache)
    assert cache.length == length
    torch.testing.assert_close(target.logits(result.hidden)[-1], expected[length - 1], **TOLERANCE)
    for i in range(length, length + 4):
        result = target.forward(torch.tensor([tokens[i]]), torch.tensor([i]), cache)
        torch.testing.assert_close(target.logits(result.hidden)[0], expected[i], **TOLERANCE)
        cache.commit((0,))


@pytest.mark.parametrize(("family", "length"), lengths(60, 255))
@pytest.mark.parametrize("way", WAYS)
def test_tree_pass_equals_eager_on_every_branch_and_after_commit(
    family: str, way: str, length: int
) -> None:
    model = tiny_model(family)
    target = _target(way, model)
    text = _text(length)
    cache = target.new_cache(length + 60, is_long=target.rotary.is_long(length + 10))
    target.prefill(text[:-1], cache)
    builder = CandidateTree(text[-1])
    add_levels(builder, [[5], [6, 7, 8], [9, 10]])
    builder.add_path([5, 7, 30, 31])
    builder.add_path([40, 41])
    tree = builder.build()

    def run() -> torch.Tensor:
        positions = torch.tensor(tree.depths) + len(text) - 1
        return target.logits(
            target.forward(torch.tensor(tree.tokens), positions, cache, tree.parents).hidden
        )

    logits = run()
    for node in range(len(tree)):
        branch = text + [tree.tokens[i] for i in tree.path(node)]
        torch.testing.assert_close(logits[node], _eager(model, branch)[-1], **TOLERANCE)

    # Commit a path whose rows are not adjacent, then go on from it.
    nodes = (0, *tree.path(tree.tokens.index(31)))
    assert nodes != tuple(range(len(nodes)))
    cache.commit(nodes)
    grown = text + [5, 7, 30, 31]
    result = target.forward(torch.tensor([12]), torch.tensor([len(grown)]), cache)
    torch.testing.assert_close(
        target.logits(result.hidden)[0], _eager(model, [*grown, 12])[-1], **TOLERANCE
    )


def test_the_lean_decoder_is_taken_where_it_fits() -> None:
    for family in FAMILIES:
        assert isinstance(make_target(tiny_model(family)), NativeTarget)
    odd = tiny_model("llama", hidden_act="gelu")
    assert isinstance(make_target(odd), GenericTarget)


# ---- which backend -------------------------------------------------------------------------------


@pytest.fixture
def made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend is there yet."""
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.delenv("TOKENSWIFT_KERNELS", raising=False)


def test_kernels_that_are_asked_for_and_do_not_work(
    made_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "open_backend", lambda device: "no driver")
    monkeypatch.setattr(cpu_check, "library", lambda folder, *_: "no compiler")
    with pytest.raises(
        InputError, match=r"backend is 'cuda', but the CUDA kernels .* \(no driver\); valid: auto"
    ):
        backend_for("cuda", "cuda")
    with pytest.raises(
        InputError,
        match=r"backend is 'cpu', but CPU kernels are not available \(no compiler\); valid",
    ):
        backend_for("cpu", "cpu")
    assert backend_for("cuda").name == backend_for("cpu").name == "torch"
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.setenv("TOKENSWIFT_KERNELS", "torch")  # what "auto" means, and no more
    monkeypatch.setattr(check, "open_backend", lambda device: backend_on_cpu())
    assert backend_for("cuda").name == "torch"
    assert backend_for("cuda", "cuda").name == "cuda"


@pytest.mark.parametrize("change", ["eps", "scale"])
def test_layers_that_are_not_as_their_config_says_run_by_their_own_forward(change: str) -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1]
    if change == "eps":
        layer.input_layernorm.variance_epsilon = 0.5
    else:
        layer.self_attn.scaling *= 2
    tokens = _text(20)
    llm = LLM.from_model(model, heads=None)
    assert isinstance(llm.target, GenericTarget)
    cache = llm.target.new_cache(64)
    logits = llm.target.logits(llm.target.prefill(tokens, cache).hidden[-1:])[0]
    torch.testing.assert_close(logits, _eager(model, tokens)[-1], **TOLERANCE)
