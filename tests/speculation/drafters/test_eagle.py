"""EAGLE-3 drafters: they never change the text, and draft what the reference drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import eagles
from tests.kernels.cuda.cases import backend_on_cpu
from tests.models.test_families import FAMILIES, family_model
from tests.speculation.drafters.prices import always, fix_prices
from tests.speculation.drafters.scripted import prompt, scripted_model
from tests.speculation.drafters.test_accepted import GREEDY, NOISY, PROMPT
from tests.speculation.drafters.test_eagle_rows import SAMPLINGS, TEXT, drafts_always
from tests.speculation.eagle.reference import EagleCache, EagleReference
from tests.speculation.eagle_drafters import SIZES, random_eagle, scripted_eagle
from tests.tiny import tiny_model
from tokenswift import LLM, InputError, resume
from tokenswift.kernels.base import Backend
from tokenswift.kernels.formats import Q8_0, Stored
from tokenswift.kv.passes import Segment
from tokenswift.loader.rope import rotary_of
from tokenswift.loader.weights import unstored
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.generic import GenericTarget
from tokenswift.models.target import backend_for
from tokenswift.speculation.control import Control
from tokenswift.speculation.eagle import model as eagle_model
from tokenswift.speculation.eagle.features import Features
from tokenswift.speculation.modes import PLAIN
from tokenswift.speculation.sequence_state import BatchLoad


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter drafts in every step, as far as it may."""
    drafts_always(monkeypatch)


# ---- what must be right --------------------------------------------------------------------------


@pytest.mark.parametrize(("greedy", "names"), [(True, False), (False, True)])
def test_a_scripted_drafter_is_accepted_in_full(
    free: None, monkeypatch: pytest.MonkeyPatch, greedy: bool, names: bool
) -> None:
    """Also where it drafts again after steps without it, the prompt is longer than its window, and
    its tokens have numbers of their own."""

    def in_turn(self: Control, context: int, load: BatchLoad) -> str:
        drafts = context - PROMPT < 90 or context % 5 == 0
        return always("eagle" if drafts else PLAIN)(self, context, load)

    monkeypatch.setattr(Control, "choose_mode", in_turn)
    monkeypatch.setattr(eagle_model, "CHUNK", 16)
    params = GREEDY if greedy else NOISY
    llm = LLM.from_model(scripted_model(greedy), heads=None, eagle=scripted_eagle(names, window=12))
    options = {"ngrams": 0, "draft": "hidden"}
    steps = list(llm.stream(prompt(PROMPT), 300, strategy_options=options, sampling=params))
    drafted = [step for step in steps if step.drafted][:-1]
    assert len(drafted) > 20
    assert all(step.accepted == step.gamma for step in drafted)
    assert sum(step.gamma for step in drafted) > 4 * len(drafted)
    assert {source for step in steps for source in step.sources} == {"eagle", "target"}
    plain = llm.generate(prompt(PROMPT), 300, "autoregressive", sampling=params)
    assert [token for step in steps for token in step.token_ids] == plain.token_ids


# ---- the text ------------------------------------------------------------------------------------


def at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes and prices at random."""
    rnd = random.Random(3)

    def mode(self: Control, context: int, load: BatchLoad) -> str:
        name = rnd.choice(["eagle", "eagle", PLAIN])
        rate = rnd.choice([0.0, 0.1, 1.0])
        return always(name, rate)(self, context, load)

    fix_prices(monkeypatch)
    monkeypatch.setattr(Control, "choose_mode", mode)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        ("llama", "greedy"),
        ("qwen2-sliding", "noisy"),
        ("qwen3_moe", "noisy"),
        ("flex_olmo", "noisy"),
    ],
)
def test_the_text_is_plain_decodings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, sampling: str
) -> None:
    """Alone, in batches that share a beginning, from forks and resumed; also of models of experts,
    one of which runs through transformers' own forward."""
    at_random(monkeypatch)
    native = family not in FAMILIES
    model = tiny_model(family) if native else family_model(family, **FAMILIES[family])
    eagle = random_eagle(names=41, shared=family == "llama", feature_layers=(1, 0, 2), window=20)
    llm = LLM.from_model(model, heads=None, eagle=eagle)
    options: dict[str, Any] = {"ngrams": 0, "draft": "hidden"}
    texts = [TEXT[:45], TEXT[:40] + TEXT[:5], TEXT[:1], TEXT[:2]]
    how: dict[str, Any] = {"sampling": SAMPLINGS[sampling], "ignore_eos": True}
    plain = [llm.generate(text, 60, "autoregressive", **how).token_ids for text in texts]
    alone = [llm.generate(text, 60, "auto", options, **how) for text in texts]
    assert [out.token_ids for out in alone] == plain
    assert any("eagle" in out.token_sources for out in alone) or sampling == "greedy"
    for _ in range(2):
        together = llm.generate_many(texts, 60, "auto", options, at_once=3, **how)
        assert [out.token_ids for out in together] == plain
    fork = llm.prefill(texts[0])
    for _ in range(2):
        assert fork.generate(60, "auto", options, **how).token_ids == plain[0]
    llm.generate(texts[0], 23, "auto", options, run_dir=tmp_path / "run", **how)
    assert resume(tmp_path / "run", max_new_tokens=60, llm=llm).token_ids == plain[0]


WIDE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}


@pytest.mark.parametrize(
    "how", [{"dtype": "bfloat16"}, {"weights": "q8_0", "dtype": "int8"}], ids=str
)
@pytest.mark.parametrize("stored", [False, True])
def test_in_other_types(
    monkeypatch: pytest.MonkeyPatch,
    tiny_folder: Callable[..., Path],
    how: dict[str, Any],
    stored: bool,
) -> None:
    """What a drafter that must be right drafts in bfloat16 and in int8, and as a file stores it, is
    near what it drafts in float32."""
    at_random(monkeypatch)
    if not backend_for().formats and (stored or "weights" in how):
        pytest.skip("no compiled kernels here")
    weights = random_eagle(hidden=64, target_hidden=64, head_dim=16, intermediate=96, vocab=260)
    dense = {name: unstored(tensor, torch.float32) for name, tensor in weights.tensors.items()}
    if stored:
        wide = {name: Stored(Q8_0, Q8_0.encode(t)) for name, t in dense.items() if t.dim() > 1}
        weights = replace(weights, tensors=dense | wide)
        dense = {name: unstored(tensor, torch.float32) for name, tensor in weights.tensors.items()}
    llm = LLM(tiny_folder("llama", **WIDE), heads="none", eagle=weights, device="cpu", **how)
    plain = llm.generate(TEXT, 60, "autoregressive", ignore_eos=True)
    assert llm.generate(TEXT, 60, ignore_eos=True).token_ids == plain.token_ids
    eagle = llm.resources.eagle
    assert eagle is not None
    reference = EagleReference(replace(weights, tensors=dense), dense["embed"], dense["lm_head"])
    features = torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(1))
    rows = reference.fuse(features.transpose(0, 1).flatten(1))
    _, logits = reference.step(torch.tensor(TEXT[1:21]), rows, torch.arange(20), EagleCache())
    states = eagle.run(TEXT[1:21], eagle.fuse(features), 0, eagle.new_cache())
    assert float((eagle.logits(states) - logits).norm() / logits.norm()) < 0.05


# ---- features ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["kernels", "torch", "cuda", "transformers"])
def test_features_are_the_states_between_layers(kind: str) -> None:
    """Of prompts in chunks, trees and rows beside others'; where nobody asks there are none."""
    model = tiny_model("llama") if kind != "transformers" else family_model("granite")
    if kind == "transformers":
        target: Any = GenericTarget(model, backend_for(), rotary_of(model))
    else:
        backend = {"kernels": backend_for(), "torch": Backend(), "cuda": backend_on_cpu()}[kind]
        target = NativeTarget(model, backend, rotary_of(model))
    cache = target.new_cache(80)
    other = target.new_cache(80)
    assert target.prefill(TEXT[:7], other).features is None
    count = model.config.num_hidden_layers
    target.feature_layers = (1, 0, count)
    target.prefill_chunk = 9
    store = Features(1000)
    target.prefill(TEXT[:30], cache, features=store)
    start, features = store.drain() or (-1, torch.zeros(0))
    with torch.no_grad():
        states = model(torch.tensor([TEXT[:33]]), output_hidden_states=True).hidden_states
        # what leaves the last layer is normed there; what enters the others is not
        wanted = torch.stack([states[1][0], states[0][0]])
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    assert start == 0
    torch.testing.assert_close(features[:2], wanted[:, :30], **close)
    tree = Segment(
        torch.tensor([*TEXT[30:32], 5, TEXT[32]]),
        torch.tensor([30, 31, 31, 32]),
        cache,
        (-1, 0, 0, 1),
    )
    row = Segment(torch.tensor([3]), torch.tensor([7]), other)
    passes = target.forward_all([row, tree])
    tree_features = passes[1].features
    assert tree_features is not None
    torch.testing.assert_close(tree_features[:2, [0, 1, 3]], wanted[:, 30:], **close)
    for each in passes:
        assert each.features is not None
        torch.testing.assert_close(each.features[2], each.hidden.float())


# ---- messages ------------------------------------------------------------------------------------


def test_a_checkpoint_by_name(
    free: None, tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, a run of it that is resumed, also without a drafter; what is no drafter of the
    model."""
    folder = tiny_folder("llama")
    config = replace(SIZES, hidden=32, target_hidden=32, head_dim=8, vocab=260, draft_vocab=50)
    named = eagles.write(
        tmp_path / "drafter",
        config,
        eagles.tensors(config),
        {"d2t": eagles.ids(config) - torch.arange(50)},
        eagle_config={"eagle_aux_hidden_state_layer_ids": config.feature_layers},
    )
    llm = LLM(folder, heads="none", eagle=named, device="cpu", dtype="float32")
    plain = llm.generate(TEXT, 60, "autoregressive", ignore_eos=True)
    begun = llm.generate(
        TEXT,
        30,
        strategy_options={"ngrams": 0, "draft": "hidden"},
        ignore_eos=True,
        run_dir=tmp_path / "run",
    )
    assert begun.drafting is not None
    assert "eagle" in begun.drafting["modes"]
    resumed = resume(tmp_path / "run", max_new_tokens=50)
    assert resumed.draft_source.startswith("EAGLE-3 drafter ")
    assert resumed.token_ids == plain.token_ids[:50]
    monkeypatch.undo()  # the mode is no longer there
    without = LLM(folder, heads="none", eagle="none", device="cpu", dtype="float32")
    assert resume(tmp_path / "run", max_new_tokens=60, llm=without).token_ids == plain.token_ids
    for wrong, line in {
        "no/where/at/all": r"eagle is 'no/where/at/all': no such folder or file; valid: ",
        str(folder): "num_hidden_layers is 2; valid: 1",
    }.items():
        with pytest.raises(InputError, match=line):
            LLM(folder, heads="none", eagle=wrong, device="cpu")
    with pytest.raises(InputError, match="eagle is '3': no such folder or file; valid: "):
        LLM(folder, heads="none", eagle=3, device="cpu")  # type: ignore[arg-type]
