"""Our passes (prefill, step, tree) against transformers' eager logits, for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import FAST, rare
from tests.kernels.cuda.cases import standing
from tests.tiny import FAMILIES, VOCAB, tiny_model
from tokenswift import LLM, InputError
from tokenswift.engine.resume import reload
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cuda import check
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.torch import TorchBackend
from tokenswift.loader.rope import rotary_of
from tokenswift.models import target as targets
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.generic import GenericTarget
from tokenswift.models.target import backend_for, make_target
from tokenswift.runs.folder import load as load_run
from tokenswift.tree import CandidateTree

TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
WAYS = ("native", "native without compiled kernels", "generic")


def _target(way: str, model: Any) -> Any:
    if way == "generic":
        return GenericTarget(model, backend_for(), rotary_of(model))
    return NativeTarget(model, backend_for() if way == "native" else TorchBackend(), rotary_of(model))


def _text(length: int, seed: int = 1) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _eager(model, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def lengths(usual: int, *others: int) -> list[object]:
    """Families and lengths: in the fast suite all of the one, and each length of some of the other."""
    cases = [(family, length) for length in (usual, *others) for family in FAMILIES]
    return [case if case[1] == usual or case[0] in FAST else rare(*case) for case in cases]


@pytest.mark.parametrize(("family", "length"), lengths(37, 1, 300))
@pytest.mark.parametrize("way", WAYS)
def test_prefill_then_steps_equal_eager(
    family: str, way: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeTarget, "prefill_chunk", 270)  # two chunks, and two chunks of attention's keys
    model = tiny_model(family)
    target = _target(way, model)
    tokens = _text(length + 4)
    expected = _eager(model, tokens)
    cache = target.new_cache(length + 10)
    result = target.prefill(tokens[:length], cache)
    assert cache.length == length
    torch.testing.assert_close(target.logits(result.hidden)[-1], expected[length - 1], **TOLERANCE)
    for i in range(length, length + 4):
        result = target.forward(torch.tensor([tokens[i]]), torch.tensor([i]), cache)
        torch.testing.assert_close(target.logits(result.hidden)[0], expected[i], **TOLERANCE)
        cache.commit((0,))


@pytest.mark.parametrize(("family", "length"), lengths(60, 255))
@pytest.mark.parametrize("way", WAYS)
def test_tree_pass_equals_eager_on_every_branch_and_after_commit(family: str, way: str, length: int) -> None:
    model = tiny_model(family)
    target = _target(way, model)
    text = _text(length)
    cache = target.new_cache(length + 60)
    target.prefill(text[:-1], cache)
    builder = CandidateTree(text[-1])
    builder.add_levels([[5], [6, 7, 8], [9, 10]])
    builder.add_path([5, 7, 30, 31])
    builder.add_path([40, 41])
    tree = builder.build()

    def run() -> torch.Tensor:
        positions = torch.tensor(tree.depths) + len(text) - 1
        return target.logits(target.forward(torch.tensor(tree.tokens), positions, cache, tree.parents).hidden)

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
    torch.testing.assert_close(target.logits(result.hidden)[0], _eager(model, [*grown, 12])[-1], **TOLERANCE)


def test_the_lean_decoder_is_taken_where_it_fits() -> None:
    for family in FAMILIES:
        assert isinstance(make_target(tiny_model(family)), NativeTarget)
    odd = tiny_model("llama", hidden_act="gelu")
    assert isinstance(make_target(odd), GenericTarget)


def test_taken_weights_come_back_as_they_were() -> None:
    for tied in (False, True):
        model = tiny_model("qwen2", tie_word_embeddings=tied)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        text = _text(12)
        expected = _eager(model, text)
        target = make_target(model, take=True)
        assert isinstance(target, NativeTarget)
        if not target.backend.panels:
            pytest.skip("no compiled kernels here")
        assert target.copied_bytes == 0
        assert model.model.layers[0].self_attn.q_proj.weight.numel() == 0
        result = target.prefill(text, target.new_cache(12))
        torch.testing.assert_close(target.logits(result.hidden), expected, **TOLERANCE)
        target.give_back()
        after = model.state_dict()
        assert after.keys() == before.keys() and all(
            torch.equal(after[name], before[name]) for name in before
        )
        assert torch.equal(_eager(model, text), expected)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


# ---- which backend ----------------------------------------------------------------------------------


@pytest.fixture
def made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend is there yet."""
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.delenv("TOKENSWIFT_KERNELS", raising=False)


def test_a_backend_for_each_wish(made_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made once; graphs are a wish about cards alone."""

    def started(device: torch.device, graphs: bool) -> Backend:
        made = standing()
        made.records = graphs
        return made

    monkeypatch.setattr(check, "started", started)
    with_graphs, without = backend_for("cuda"), backend_for("cuda", graphs=False)
    assert isinstance(with_graphs, CudaBackend) and isinstance(without, CudaBackend)
    assert (with_graphs.records, without.records) == (True, False)
    assert backend_for("cuda:0") is with_graphs and backend_for("cuda:0", "auto", False) is without
    assert backend_for("cuda", "cuda").name == "cuda" and backend_for("cuda", "torch").name == "torch"
    assert backend_for("cpu", "torch").name == "torch" and backend_for("cpu", "torch") is not backend_for()
    assert backend_for("cpu", graphs=False) is backend_for()


def test_kernels_that_are_asked_for_and_do_not_work(made_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "started", lambda device, graphs: "no driver")
    monkeypatch.setattr(targets, "library", lambda folder, sets: None)
    with pytest.raises(
        InputError, match=r"backend is 'cuda', but the CUDA kernels .* \(no driver\); valid: auto"
    ):
        backend_for("cuda", "cuda")
    with pytest.raises(
        InputError, match=r"backend is 'cpu', but the CPU kernels cannot be compiled here; valid"
    ):
        backend_for("cpu", "cpu")
    assert backend_for("cuda").name == backend_for("cpu").name == "torch"
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.setenv("TOKENSWIFT_KERNELS", "torch")  # what "auto" means, and no more
    monkeypatch.setattr(check, "started", lambda device, graphs: standing())
    assert backend_for("cuda").name == "torch" and backend_for("cuda", "cuda").name == "cuda"


def test_the_backend_of_a_model(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """By name and for a loaded model; a run goes on with what it had."""
    usual = LLM(tiny_folder(), device="cpu", heads="none")
    by_torch = LLM(tiny_folder(), device="cpu", heads="none", backend="torch", cuda_graphs="off")
    lent = LLM.from_model(tiny_model("llama"), heads="none", backend="torch")
    assert by_torch.target.backend.name == lent.target.backend.name == "torch"
    assert by_torch.target.backend is lent.target.backend is not usual.target.backend
    assert by_torch.loading is not None and usual.loading is not None
    assert [by_torch.loading[key] for key in ("backend", "cuda_graphs")] == ["torch", "off"]
    assert [usual.loading[key] for key in ("backend", "cuda_graphs")] == ["auto", "auto"]
    prompt = list(range(5, 20))
    done = by_torch.generate(prompt, 8, ignore_eos=True, run_dir=tmp_path / "run")
    assert done.token_ids == usual.generate(prompt, 8, ignore_eos=True).token_ids
    state = load_run(tmp_path / "run")[1]
    assert reload(state).target.backend is by_torch.target.backend
    for how in ({"backend": "cuda"}, {"backend": "fast"}, {"cuda_graphs": "on"}):
        with pytest.raises(InputError, match=f"{next(iter(how))} is '.*; valid: auto, "):
            LLM(tiny_folder(), device="cpu", **how)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"{next(iter(how))} is '.*; valid: auto, "):
            LLM.from_model(tiny_model("llama"), **how)  # type: ignore[arg-type]


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
