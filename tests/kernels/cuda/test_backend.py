"""The CUDA backend's own code - buffers, padding, segments, weights - on CPU tensors."""

from __future__ import annotations

import logging
from functools import partial, partialmethod
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.cuda.cases import CPU, random, segment
from tests.kernels.test_segments import TEXTS, Layers
from tests.lossless.test_strategies import PAPER, PROMPT, SMALL, runs
from tests.lossless.test_tokens import random_heads
from tests.spec.eagle_drafters import random_eagle
from tests.tiny import FAMILIES, VOCAB, byte_model, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.engine.step import RunningSequence, advance, prefill
from tokenswift.interfaces import TokenSequence
from tokenswift.kernels.cuda import check, products
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.graphs import Graphs
from tokenswift.kernels.cuda.launch import Kernels
from tokenswift.kernels.cuda.reference import Reference
from tokenswift.kernels.torch import TorchBackend
from tokenswift.loader.rope import rotary_of
from tokenswift.metrics import Meter
from tokenswift.models import target as targets
from tokenswift.models.decoder import NativeTarget
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.adaptive.cost import Table
from tokenswift.spec.adaptive.recipe import ByChance
from tokenswift.spec.drafters.candidates import Candidates
from tokenswift.spec.drafters.eagle import EagleDrafter
from tokenswift.spec.drafters.heads import HeadDrafter
from tokenswift.spec.drafters.lookup import Ngrams, PromptLookup
from tokenswift.spec.drafters.model import ModelContext, ModelDrafter
from tokenswift.spec.drafters.partial import PartialDrafter, SparseContext
from tokenswift.spec.drafters.recipe import FixedWidths
from tokenswift.spec.eagle.packed import EagleModel
from tokenswift.spec.methods.autoregressive import Autoregressive
from tokenswift.tree import CandidateTree


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_layers_are_those_of_the_torch_path(weights: torch.dtype) -> None:
    ours, torchs = (Layers(made, weights, weights) for made in (CudaBackend("cpu"), TorchBackend()))
    pairs = zip(*(each.run([each.text(*sizes) for sizes in TEXTS]) for each in (ours, torchs)), strict=True)
    near = 2e-2 if weights == torch.bfloat16 else 1e-5
    for found, expected in pairs:
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            assert float((one.float() - other.float()).norm() / other.float().norm()) < near


@pytest.mark.parametrize(
    "family,new",
    [
        ("llama", 20),
        ("gemma2", 20),
        *(pytest.param(family, 90, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_every_strategy_writes_what_plain_decoding_writes(
    backend: CudaBackend, family: str, new: int
) -> None:
    native = family != "gemma2"
    make = tiny_model if native else byte_model
    llm = LLM.from_model(make(family), heads=random_heads("medusa", 48, VOCAB) if native else "none")
    assert llm.target.backend is backend and isinstance(llm.target, NativeTarget) is native
    draft = make(family, seed=1)
    params = SamplingParams(seed=1, **PAPER)
    plain = llm.generate(PROMPT, new, "autoregressive", sampling=params, ignore_eos=True)
    lengths = []
    for strategy, options in runs(draft):
        if native or strategy in ("magicdec", "triforce"):  # the others need heads
            got = llm.generate(PROMPT, new, strategy, options, params, ignore_eos=True)
            assert got.token_ids == plain.token_ids, (strategy, options)
            lengths.append(got.metrics.mean_acceptance_length)
    assert max(lengths) > 1.1
    auto = llm.generate(PROMPT, new, sampling=params, ignore_eos=True)
    assert auto.token_ids == plain.token_ids


def test_the_text_is_the_torch_paths(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(seed=2, **PAPER)
    texts = []
    for made in (backend, TorchBackend()):
        monkeypatch.setitem(targets._backends, "cpu", made)
        llm = LLM.from_model(tiny_model("llama"))
        texts.append(llm.generate(PROMPT, 60, "autoregressive", sampling=params, ignore_eos=True).token_ids)
    assert texts[0] == texts[1]


def test_a_path_is_committed_by_the_kernels(backend: CudaBackend) -> None:
    moves: list[tuple[int, list[int]]] = []

    class Noted(Reference):
        def move(self, data: Tensor, start: int, nodes: Any) -> None:
            moves.append((start, list(nodes)))
            super().move(data, start, nodes)

    cache = CudaBackend("cpu", Noted()).new_cache(1, 2, 4, 9, torch.float32)
    cache.data.copy_(random(*cache.data.shape))
    expected = cache.data[:, :, [0, 1, 2, 3, 5, 8]].clone()
    cache.commit((0, 1))
    cache.fork(9).commit((0, 1, 3, 6))
    assert moves == [(4, [1, 4])]
    cache.commit((0, 1, 3, 6))
    assert torch.equal(cache.data[:, :, :6], expected)


class Broken(Reference):
    """Kernels that are not what they should be."""

    def __init__(self, defect: str) -> None:
        self.defect = defect

    def attend(self, plan: Any, query: Tensor, *rest: Any) -> Tensor:
        made = super().attend(plan, query, *rest)
        if self.defect == "wrong":
            return made * 1.05
        return made + 1e-5 * (len(query) > 16) if self.defect == "rows" else made


@pytest.mark.parametrize("defect,said", [("wrong", "from the reference"), ("rows", "rows in 1 passes")])
def test_kernels_that_do_not_work_are_found(defect: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own sums have other bits where there are more rows, so here what is nearly equal counts."""
    monkeypatch.setattr(torch, "equal", partial(torch.allclose, rtol=0, atol=1e-6))
    found, sound = (
        check.fault(CudaBackend("cpu", Broken(one)), [(torch.float32, None, None)]) for one in (defect, "")
    )
    assert found is not None and said in found and sound is None


def test_passes_that_are_replayed_wrongly_are_not_replayed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU the buffers are the same; here numbers of the call before are in them, or nothing works."""
    assert check.unrecorded(CudaBackend("cpu")) is None

    class Late(Graphs):
        def run(self, key: Any, work: Any, *given: Tensor) -> Any:
            self.before, given = given, getattr(self, "before", given)
            return super().run(key, work, *given)

    class Failing(Graphs):
        def run(self, key: Any, work: Any, *given: Tensor) -> Any:
            raise RuntimeError("no capture\nhere")

    for kind, said in ((Late, "replays have other bits"), (Failing, "no capture here")):
        backend = CudaBackend("cpu")
        monkeypatch.setattr(backend, "replays", lambda kind=kind: kind(CPU))
        assert check.unrecorded(backend) == said


def test_torch_takes_over_where_kernels_do_not_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.setattr(check, "started", lambda device, graphs: "no driver")
    with caplog.at_level(logging.WARNING, "tokenswift"):
        found = targets.backend_for("cuda:0")
    assert isinstance(found, TorchBackend) and not found.decodes and not found.equal_bits
    assert caplog.messages == ["the CUDA kernels do not work here (no driver); the slower torch path is used"]


def test_torch_is_chosen_for_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.setenv("TOKENSWIFT_KERNELS", "torch")
    assert targets.backend_for("cuda").name == "torch"


def test_a_weight_of_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="packed by another backend"):
        CudaBackend("cpu").linear(random(2, 4), TorchBackend().pack(random(3, 4)))


def test_keys_of_other_types_are_torchs() -> None:
    text, query = segment(5, 2, None, 2, 8, torch.float64), random(4, 2, 8, dtype=torch.float64)
    found = CudaBackend("cpu").attend(query, 0, text.cache, None, 0.3)
    assert torch.equal(found, TorchBackend(CPU).attend(query, 0, text.cache, None, 0.3))


class Unstarted(Kernels):
    """Kernels that are not started; what they would be given is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    def run(self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any) -> None:
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        wrong = [name for name, value in tensors.items() if not (value.is_meta and value.is_contiguous())]
        assert not wrong, (kernel, wrong)
        self.started.append(kernel.__name__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_a_pass_leaves_nothing_on_the_host(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory stands for the card: an operation over two devices is an error. A layer starts
    as many kernels for 48 rows as for one."""
    meta, ops = torch.device("meta"), Unstarted()
    backend = CudaBackend(
        meta, ops, lambda states, weight: torch.empty(len(states), len(weight), device=meta)
    )
    whole = dtype == torch.int8  # keys and values alone
    model = tiny_model("qwen3", hidden_size=64, num_attention_heads=4)
    model = model.to(meta, torch.bfloat16 if whole else dtype)
    monkeypatch.setattr(
        products, "keeps_bits", lambda library, weight: True
    )  # there are no values to compare
    target = NativeTarget(model, backend, rotary_of(model))
    target.take_keys(dtype, "kv_cache_dtype")
    cache = target.new_cache(60)
    made = target.prefill(list(range(2, 50)), cache)
    assert made.hidden.is_meta and target.logits(made.hidden).shape == (32, VOCAB)
    cache.commit((1, 3))
    chunks = "attend_whole_chunks" if whole else "attend_chunks"
    assert ops.started.count(chunks) == 2 * target.layers and ops.started[-1] == "move_rows"


@pytest.mark.parametrize(
    "strategy,options,kind",
    [
        ("tokenswift", {"tree": (3, 3), "ngrams": 0, "draft": "partial", **SMALL}, "conditioned"),
        ("tokenswift", {"tree": (3, 2, 2), "ngrams": 2, "draft": "hidden", **SMALL}, "conditioned"),
        ("magicdec", {"gamma": 4, **SMALL}, "conditioned"),
        ("medusa", {"tree": (3, 2, 2)}, "medusa"),  # the second head's rows are refused
    ],
)
def test_drafts_that_are_waited_for_together_are_those_of_single_waits(
    strategy: str, options: dict[str, Any], kind: str, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that stay on the device from pass to pass and level to level, in pass, window and noise: the
    same trees, also where fewer tokens than places are left, or none."""
    heads = random_heads(kind, 48, VOCAB)
    if kind == "medusa":
        torch.nn.init.constant_(next(heads.layers[1].parameters()), torch.nan)
    llm = LLM.from_model(tiny_model("llama"), heads=heads)
    trees: list[list[Any]] = [[], []]
    build = CandidateTree.build

    def noted(tree: CandidateTree, *given: Any, into: list[Any]) -> Any:
        into.append(build(tree, *given))
        return into[-1]

    for later in (True, False):
        monkeypatch.setattr(CandidateTree, "build", partialmethod(noted, into=trees[later]))
        if not later:
            none = property(lambda self: None, lambda self, ranker: None)
            monkeypatch.setattr(Sampler, "later", none, raising=False)
        params = SamplingParams(seed=4, top_k=2, **PAPER)  # two candidates for three places
        llm.generate(PROMPT, 40, strategy, options, params, ignore_eos=True)
    known = [tree for tree in trees[1] if min(tree.tokens) >= 0]
    assert trees[0] == known and max(len(tree) for tree in known) > 2
    assert (len(known) < len(trees[1])) != bool(options.get("ngrams"))


def eagle_of(target: NativeTarget) -> EagleDrafter:
    """A drafter whose features the target's passes give."""
    weights = random_eagle(window=12, std=0.1)
    target.tap(weights.config.feature_layers)
    return EagleDrafter(EagleModel(weights, target))


def model_of(target: NativeTarget) -> ModelDrafter:
    """The model itself, over a cache of its own."""
    model = tiny_model("llama").to(target.device)
    own = NativeTarget(model, target.backend, rotary_of(model))
    return ModelDrafter(ModelContext(own, "streaming", 128, 3, 5), target, ("draft_model", "given"))


def text_of(target: NativeTarget, drafter: Any, sampler: Sampler) -> RunningSequence:
    """A text after its prompt's prefill."""
    sequence = TokenSequence(list(PROMPT), len(PROMPT), target.new_cache(200), target, sampler)
    eagles = [one for one in getattr(drafter, "drafters", []) if isinstance(one, EagleDrafter)]
    sequence.features = eagles[0].model.features() if eagles else None
    prefill(sequence)
    text = RunningSequence(sequence, drafter, sampler, 60, (), Meter())
    text.begin()
    return text


@pytest.mark.parametrize("kind,widths,top_k", [(eagle_of, (3, 2, 2), 30), (model_of, (2, 1, 1, 1), 1)])
def test_passes_whose_tokens_stay_on_the_device_are_those_of_single_waits(
    kind: Any, widths: tuple[int, ...], top_k: int, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EAGLE-3 drafter and a draft model: the same steps and passes that draft, and drafts that are often
    right. Where one candidate is left, the second place of the first level stays empty, so rows of the verify
    pass have other numbers than nodes of the tree."""
    model, run = tiny_model("llama"), NativeTarget.run
    found: list[list[Any]] = [[], []]
    for later in (True, False):
        if not later:
            none = property(lambda self: None, lambda self, ranker: None)
            monkeypatch.setattr(Sampler, "later", none, raising=False)
        target, seen = NativeTarget(model, backend, rotary_of(model)), found[later]
        sampler = target.sampler(
            SamplingParams(seed=4, top_k=top_k, repetition_penalty=1.1, penalty_window=24)
        )
        drafter = FixedWidths([kind(target)], sampler, True, widths, ("tree", widths))

        def noted(self: NativeTarget, segments: Any, *given: Any, of: Any = (target, seen)) -> Any:
            if self is not of[0]:
                of[1].append(segments[0].tokens.tolist())
            return run(self, segments, *given)

        monkeypatch.setattr(NativeTarget, "run", noted)
        text, accepted = text_of(target, drafter, sampler), 0
        while not text.is_done:
            step = advance([text])[0]
            assert not isinstance(step, Exception), step
            seen.append((step.token_ids, step.drafted, step.sources))
            accepted += step.accepted
        assert accepted > 2
    assert found[0] == found[1]


def test_heads_go_on_from_the_pass_that_they_follow(backend: CudaBackend) -> None:
    """Also where more passes were made than the chain kept."""
    model = tiny_model("llama")
    target = NativeTarget(model, backend, rotary_of(model))
    sampler = target.sampler(SamplingParams(seed=4))

    class Noted:
        def grow(self, candidates: Any, nodes: list[int], base: Tensor, kind: str) -> None:
            bases.append((candidates.tree.tokens[nodes[0]], base))

    class Kept(Candidates):
        def chain(self, *given: Any, **more: Any) -> list[int]:
            super().chain(*given, **more)
            return [1]

    bases: list[tuple[int, Tensor]] = []
    for passes in (3, 1):
        sequence = TokenSequence(list(PROMPT), len(PROMPT), target.new_cache(100), target, sampler)
        prefill(sequence)
        drafter = PartialDrafter(target, SparseContext(target, "important", 24, 3, 5), cast(Any, Noted()))
        Kept(sequence, sampler, True, (1,) * (passes + 1), passes).ask(drafter)
    (one, base), (other, expected) = bases
    assert one == other and torch.equal(base, expected)


class Waits(TorchDispatchMode):
    """Counts what a host would wait for: numbers that are sent in a way that blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        here = bool(args) and isinstance(args[0], Tensor) and args[0].device.type == "cpu"
        there = str(kwargs.get("device", "")) == "meta"
        if name == "_to_copy" and here and there and not kwargs.get("non_blocking"):
            self.seen.append(name)
        if name == "copy_" and args[1].device.type == "cpu" and args[0].is_meta and not any(args[2:]):
            self.seen.append(name)
        return func(*args, **kwargs)


def test_a_prompt_is_read_in_long_passes_whose_room_does_not_grow_with_it() -> None:
    """2,048 rows a pass; sums of chunks are kept of the few rows behind them alone."""

    class Rooms(Unstarted):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, int, int]] = []

        def run(self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any) -> None:
            super().run(kernel, grid, warps, stages, **given)
            if "query" in given and "values" in given:
                self.seen.append((kernel.__name__, len(given["query"]), given["values"].numel()))

    meta, ops = torch.device("meta"), Rooms()
    model = tiny_model("llama", num_hidden_layers=1).to(meta, torch.bfloat16)  # six heads of 8, two of keys
    target = NativeTarget(model, CudaBackend(meta, ops), rotary_of(model))
    target.prefill([5] * 4200, target.new_cache(4200))
    room = -(-2048 // 21) * 2 * 64 * 8
    cells = 4 + 1  # spans before the last long pass ends, and the chunk of its rows
    assert ops.seen == [
        ("attend_rows", 2048, room),
        ("attend_rows", 2048, room),
        ("attend_chunks", 72, cells * 72 * 48),
        ("attend_chunks", 64, (8 + 2) * 64 * 48),
    ]


@pytest.mark.parametrize(
    "strategy,waits",
    [
        ("autoregressive", [1, 1, 1]),
        ("medusa", [1, 1, 1]),
        ("magicdec", [1, 1, 1]),
        ("partial", [1, 1, 1]),
        ("auto", [1, 1, 1]),
        ("eagle", [1, 1, 1]),
        ("model", [1, 1, 1]),
        ("ngrams", [2, 2, 2]),
    ],
)
def test_a_step_waits_for_the_device_once(
    strategy: str, waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without memory stands for the card: whatever looks at a value is an error, but for what brings
    rankings back: those of all levels of heads and of all passes of a chain with the choices. N-grams go on
    behind a drafted token, so they wait for it."""
    meta, ops = torch.device("meta"), Unstarted()
    backend = CudaBackend(
        meta, ops, lambda states, weight: torch.empty(len(states), len(weight), device=meta)
    )
    monkeypatch.setattr(products, "keeps_bits", lambda library, weight: True)
    found: list[int] = []

    def fetch(made: Tensor) -> list[Any]:
        assert made.is_meta and made.shape[2] == 3
        found.append(len(made))
        return [[[5.0 + n, 0.5, 0.1] for n in range(made.shape[1])] for _ in range(len(made))]

    def tensor(*args: Any, device: Any = "cpu", **kwargs: Any) -> Tensor:
        assert torch.device(device).type == "cpu", "numbers that a device is waited for"
        return plain_tensor(*args, **kwargs)

    plain_tensor = torch.tensor
    monkeypatch.setattr(backend, "fetch", fetch)
    model = tiny_model("llama").to(meta)
    target = NativeTarget(model, backend, rotary_of(model))
    params = SamplingParams(seed=1, **PAPER)
    sampler = target.sampler(params)
    levels = HeadDrafter(target, random_heads("medusa", 48, VOCAB).to(meta), False)
    if strategy in ("medusa", "ngrams"):
        ngrams = [Ngrams(2, 1, sampler, True)] if strategy == "ngrams" else []
        drafter: Any = FixedWidths([levels, *ngrams], sampler, True, (2, 2, 1), ("tree", (2, 2, 1)))
    elif strategy == "auto":
        free = Table((1, 32), (1.0, 1.001), (0.0, 0.0), 1e-3)  # whatever may come is drafted
        drafter = ByChance([PromptLookup(True), levels], sampler, True, lambda: free)
    elif strategy in ("magicdec", "partial"):
        context = SparseContext(target, "important", 24, 3, 5)
        heads = HeadDrafter(target, random_heads("conditioned", 48, VOCAB).to(meta), False)
        chain = PartialDrafter(target, context, heads if strategy == "partial" else None)
        widths, most = ((1, 1, 1), 3) if strategy == "magicdec" else ((2, 2, 1), 1)
        drafter = FixedWidths([chain], sampler, True, widths, ("gamma", 3), most=most)
    elif strategy in ("eagle", "model"):
        kind = {"eagle": eagle_of, "model": model_of}[strategy]
        drafter = FixedWidths([kind(target)], sampler, True, (2, 2, 1), ("tree", (2, 2, 1)))
    else:
        drafter = Autoregressive(None, None, sampler)
    text = text_of(target, drafter, sampler)
    with Waits() as mode:
        monkeypatch.setattr(torch, "tensor", tensor)
        counts: list[int] = []
        for _ in waits:
            before = len(found)
            made = advance([text])[0]
            assert not isinstance(made, Exception), made
            counts.append(len(found) - before)
        monkeypatch.undo()
        drafted = len(drafter.draft(text.sequence))
    assert counts == waits and not mode.seen and (drafted > 3) == (strategy != "autoregressive")
