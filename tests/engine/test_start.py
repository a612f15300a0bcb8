"""The second load of a model: read from its files, without transformers, and the same in everything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.chats import chat_tokenizer
from tests.conftest import tiny_tokenizer
from tests.tiny import BYTES, FAMILIES, build
from tokenswift import LLM, SamplingParams
from tokenswift.engine.source import FromFiles, FromModel, cards_folder
from tokenswift.kernels.weights import PANEL, Packed
from tokenswift.loader import card as cards
from tokenswift.loader.identity import digest_of
from tokenswift.loader.prompts import prompt_ids
from tokenswift.loader.stand_in import StandIn, describe
from tokenswift.models import target as targets
from tokenswift.models.decoder import LeanTarget
from tokenswift.types import InputError

GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)
SAMPLED = SamplingParams(seed=3, min_p=0.02, penalty_window=20)
PROMPT = [5, 9, 200, 33, 5, 9, 200, 34, 71, 5, 9]


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """``save(family, tokenizer, shard=…, **config changes)`` → a model folder of its own."""

    def make(family: str = "llama", tokenizer: Any = None, shard: str = "50GB", **changes: Any) -> Path:
        kind, extra = FAMILIES[family]
        model = build(kind, {**BYTES, "initializer_range": 0.2}, **{**extra, "head_dim": 8, **changes})
        folder = tmp_path / "model"
        model.to(getattr(torch, changes.get("dtype", "float32"))).save_pretrained(
            folder, max_shard_size=shard
        )
        (tokenizer or tiny_tokenizer()).save_pretrained(folder)
        return folder

    return make


def both(folder: Path, **options: Any) -> tuple[LLM, LLM]:
    """The first load of a model and the second."""
    first, second = (LLM(folder, device="cpu", heads="none", **options) for _ in range(2))
    assert isinstance(first.source, FromModel) and isinstance(second.source, FromFiles)
    return first, second


def texts(llm: LLM) -> list[list[int]]:
    """Tokens by plain decoding and by trees, greedy and sampled."""
    options = {"tree": (2, 2), "ngrams": 4, "budget": 24, "draft": "partial"}
    return [
        llm.generate(PROMPT, 24, strategy, given, params, ignore_eos=True).token_ids
        for params in (GREEDY, SAMPLED)
        for strategy, given in (("autoregressive", None), ("tokenswift", options))
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_second_load_is_the_first(save: Callable[..., Path], family: str, tied: bool) -> None:
    first, second = both(save(family, tie_word_embeddings=tied))
    assert texts(first) == texts(second)
    assert first.identity() == second.identity() and first.numerics() == second.numerics()
    assert first.source.end_tokens() == second.source.end_tokens() == {257}
    assert isinstance(first.target, LeanTarget) and isinstance(second.target, LeanTarget)
    assert first.target.layout == second.target.layout and second.target.copied_bytes == 0
    assert (first.target.weight_bytes, first.target.windows) == (
        second.target.weight_bytes,
        second.target.windows,
    )
    assert torch.equal(first.target.rotary_frequencies, second.target.rotary_frequencies)
    assert first.target.rotary.scaling == second.target.rotary.scaling
    assert first.source.host.base.distance(second.source.host.base) == 0


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": True}, {"vocab_size": 263}])
def test_biases_and_odd_sizes(save: Callable[..., Path], changes: dict[str, Any]) -> None:
    first, second = both(save(**changes))
    assert texts(first) == texts(second)


@pytest.mark.parametrize(("stored", "wanted"), [("float32", "bfloat16"), ("bfloat16", "auto")])
def test_types_and_shards(save: Callable[..., Path], stored: str, wanted: str) -> None:
    folder = save("qwen2", shard="20KB", dtype=stored)
    assert len(list(folder.glob("*.safetensors"))) > 1
    first, second = both(folder, dtype=wanted)
    assert first.dtype == second.dtype == "bfloat16"
    assert texts(first) == texts(second) and first.identity() == second.identity()


def test_longer_positions(save: Callable[..., Path]) -> None:
    first, second = both(save(), rope_scaling="yarn:4")
    assert texts(first) == texts(second)
    assert second.target.rotary.limit == first.target.rotary.limit == 1024
    assert isinstance(LLM(save(), device="cpu", heads="none").source, FromModel)  # another wish


def test_transformers_model_and_tokenizer_when_asked_for(save: Callable[..., Path]) -> None:
    folder = save("qwen3", chat_tokenizer())
    first, second = both(folder)
    assert isinstance(second.source.codec, StandIn)
    assert type(second.tokenizer) is type(first.tokenizer)
    assert second.model.state_dict().keys() == first.model.state_dict().keys()
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        assert torch.equal(first.model(ids).logits, second.model(ids).logits)
    assert second.generation_config.eos_token_id == first.generation_config.eos_token_id
    second.model.generation_config.eos_token_id = 7
    assert second.source.end_tokens() == {7, 257}


def test_files_that_changed_are_not_mixed(save: Callable[..., Path]) -> None:
    folder = save()
    first, second = both(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for asked in ("model", "tokenizer"):
        with pytest.raises(InputError, match="has changed since the model was loaded"):
            getattr(second, asked)
    assert texts(second) == texts(first)  # it has its weights
    third = LLM(folder, device="cpu", heads="none")
    assert isinstance(third.source, FromModel) and third.identity() != first.identity()


def test_the_check_runs_once(save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    real = targets.distance
    monkeypatch.setattr(targets, "distance", lambda *given: ran.append(1) or real(*given))
    first, second = both(save())
    assert len(ran) == 1 and first.target.far == second.target.far < 1e-3


def damaged(change: Callable[[dict[str, Any]], object], sealed: bool) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        kept = json.loads(path.read_text())
        change(kept["card"])
        if sealed:
            kept["digest"] = digest_of(kept["card"])
        path.write_text(json.dumps(kept))

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "list": lambda path: path.write_text("[]"),
    "half": lambda path: path.write_text(path.read_text()[:100]),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "value": damaged(lambda card: card["rope"][0].reverse(), sealed=False),
    "layers": damaged(lambda card: card["layout"].update(num_hidden_layers=3), sealed=True),
    "heads": damaged(lambda card: card["layout"].update(num_attention_heads=0), sealed=True),
    "text": damaged(lambda card: card["layout"].update(eps="1e-5"), sealed=True),
    "frequencies": damaged(lambda card: card["rope"][0].pop(), sealed=True),
    "nan": damaged(lambda card: card["rope"].__setitem__(1, float("nan")), sealed=True),
    "far": damaged(lambda card: card.update(far=0.5), sealed=True),
    "ends": damaged(lambda card: card.update(ends=[2.5]), sealed=True),
    "type": damaged(lambda card: card["identity"].update(dtype="int8"), sealed=True),
    "tokenizer": damaged(lambda card: card["tokenizer"].update(template=3), sealed=True),
    "more": damaged(lambda card: card.update(more=1), sealed=True),
    "shape": damaged(lambda card: card["layout"].update(vocab_size=261), sealed=True),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_card_counts_as_none(save: Callable[..., Path], damage: str) -> None:
    folder = save("llama", chat_tokenizer())
    first = LLM(folder, device="cpu", heads="none")
    (path,) = cards_folder().glob("*.json")
    whole = path.read_text()
    DAMAGES[damage](path)
    again = LLM(folder, device="cpu", heads="none")
    assert isinstance(again.source, FromModel) and path.read_text() == whole
    assert texts(again) == texts(first)


def test_old_cards_go(save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "MOST", 2)
    folder = save()
    for dtype in ("float32", "bfloat16", "float32", "float16"):  # what was read last stays
        LLM(folder, device="cpu", heads="none", dtype=dtype)
    assert len(list(cards_folder().iterdir())) == 2
    for dtype, kind in (("float32", FromFiles), ("float16", FromFiles), ("bfloat16", FromModel)):
        assert isinstance(LLM(folder, device="cpu", heads="none", dtype=dtype).source, kind)


def test_a_cache_that_cannot_be_written(save: Callable[..., Path], own_cache: Path) -> None:
    (own_cache / "cards").write_text("no folder")
    for _ in range(2):
        assert isinstance(LLM(save(), device="cpu", heads="none").source, FromModel)


def test_what_goes_through_transformers(save: Callable[..., Path]) -> None:
    folder = save(hidden_act="gelu")  # no lean decoder
    for _ in range(2):
        assert isinstance(LLM(folder, device="cpu", heads="none").source, FromModel)
    folder = save()
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)  # transformers leaves it out
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for _ in range(2):
        assert isinstance(LLM(folder, device="cpu", heads="none").source, FromModel)


# ---- the tokenizer's stand-in ------------------------------------------------------------------------------


def test_the_stand_in_does_as_the_tokenizer(tmp_path: Path) -> None:
    for adds_bos in (False, True):
        real = chat_tokenizer(adds_bos)
        real.save_pretrained(tmp_path)
        said = describe(real, tmp_path)
        assert said is not None
        made = StandIn(tmp_path, **said)
        for text in ("Hi", "", "<s>Hi</s> there", "Grüße, \U0001f600\n", "<s>"):
            assert made(text)["input_ids"] == real(text)["input_ids"]
            bare = real(text, add_special_tokens=False)["input_ids"]
            assert made(text, add_special_tokens=False)["input_ids"] == bare
            assert made.decode(bare) == real.decode(bare)
            names = [made.convert_ids_to_tokens(token) for token in bare]
            assert names == real.convert_ids_to_tokens(bare)
        chat = [{"role": "user", "content": "a", "name": "b"}]  # more than a role and a text
        written = real.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for tokenizer in (made, real):
            ids = prompt_ids(chat, tokenizer, 260)
            assert ids == real(written, add_special_tokens=False)["input_ids"]


def test_several_templates_are_left_to_transformers(tmp_path: Path) -> None:
    real = tiny_tokenizer()
    real.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    real.save_pretrained(tmp_path)
    assert describe(real, tmp_path) is None


def test_a_tokenizer_unlike_its_file_is_left_to_transformers(tmp_path: Path) -> None:
    real = tiny_tokenizer()
    real.save_pretrained(tmp_path)
    assert describe(real, tmp_path) is not None
    real.add_tokens(["new"])
    assert describe(real, tmp_path) is None
    split = tiny_tokenizer()
    split.split_special_tokens = True
    assert describe(split, tmp_path) is None
    shutil.rmtree(tmp_path)
    assert describe(tiny_tokenizer(), tmp_path) is None


# ---- what is imported, and packing -------------------------------------------------------------------------

DRIVER = """
import sys
from tokenswift.cli.main import main
code = main(sys.argv[1:])
loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "transformers")
print("loaded:", *loaded)
raise SystemExit(code)
"""


def imported(*argv: object) -> tuple[str, set[str]]:
    """What the command line wrote, and the modules of transformers that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    text, _, names = done.stdout.rpartition("loaded:")
    return text, set(names.split())


def test_the_second_start_imports_no_transformers(save: Callable[..., Path], tmp_path: Path) -> None:
    folder = save("llama", chat_tokenizer())
    call = ("generate", "Hi", "--model", folder, "--max-new-tokens", 4, "--quiet", "--ignore-eos")
    first, heavy = imported(*call)
    assert "transformers.modeling_utils" in heavy
    second, light = imported(*call, "--run-dir", tmp_path / "run")
    assert second == first and not light


@pytest.mark.model
def test_the_default_model_imports_no_transformers(monkeypatch: pytest.MonkeyPatch, embedded: str) -> None:
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(Path(embedded).parent))
    call = ("generate", "Hi", "--max-new-tokens", 3, "--quiet")
    first, _ = imported(*call)
    second, light = imported(*call)
    assert second == first and not light


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(64,), (33,), (5, 7), (96, 32, 32), (31, 33, 1), (40, 80)])
def test_packing_several_weights(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    made = torch.Generator().manual_seed(1)
    parts = [torch.randn(count, 48, generator=made).to(dtype) for count in rows]
    parts[0] = torch.randn(rows[0] * 48 + 1, generator=made).to(dtype)[1:].view(rows[0], 48)  # not aligned
    whole, packed = torch.cat(parts), Packed(parts, panels=True)
    assert torch.equal(packed.unpack(), whole) and len(packed.data) == -(-len(whole) // PANEL)
    assert torch.equal(packed.data, Packed(torch.nn.Parameter(whole), panels=True).data)
    padding = packed.data[-1].transpose(0, 1)[len(whole) % PANEL or PANEL :]
    assert not padding.any() and torch.equal(Packed(parts, panels=False).data, whole)
