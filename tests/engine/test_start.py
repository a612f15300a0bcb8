"""A model that is read from its files, without transformers, and is the same in everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.chats import chat_tokenizer
from tests.conftest import tiny_tokenizer
from tests.families import rare
from tests.gguf_files import QuantType, small, write
from tests.tiny import BYTES, FAMILIES, PLAIN, SWITCHED, build
from tokenswift import LLM, SamplingParams
from tokenswift.chat.prompts import prompt_ids
from tokenswift.loader import safetensors_file
from tokenswift.loader.config import completed
from tokenswift.loader.identity import tokenizer_digest
from tokenswift.loader.load import load
from tokenswift.loader.plain_tokenizer import read
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.source import FromFiles, FromModel
from tokenswift.types import InputError

GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)
SAMPLED = SamplingParams(seed=3, min_p=0.02, penalty_window=20)
PROMPT = [5, 9, 200, 33, 5, 9, 200, 34, 71, 5, 9]


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """``save(family, tokenizer, shard=…, **config changes)`` → a model folder of its own."""

    def make(
        family: str = "llama", tokenizer: Any = None, shard: str = "50GB", **changes: Any
    ) -> Path:
        kind, extra = FAMILIES[family]
        model = build(
            kind, {**BYTES, "initializer_range": 0.2}, **{"head_dim": 8, **extra, **changes}
        )
        folder = tmp_path / "model"
        model.to(getattr(torch, changes.get("dtype", "float32")))
        model.save_pretrained(folder, max_shard_size=shard)
        (tokenizer or tiny_tokenizer()).save_pretrained(folder)
        return folder

    return make


def both(folder: Path, **options: Any) -> tuple[LLM, LLM]:
    """The model through transformers, and from its files."""
    loaded = load(folder, options.get("dtype", "auto"), "cpu")
    first = LLM.from_model(
        loaded.model, loaded.tokenizer, heads="none", rope_scaling=options.get("rope_scaling")
    )
    second = LLM(folder, device="cpu", heads="none", **options)
    assert type(first.source) is FromModel
    assert isinstance(second.source, FromFiles)
    return first, second


def texts(llm: LLM) -> list[list[int]]:
    """Tokens by plain decoding and by trees, greedy and sampled."""
    options = {"tree": (2, 2), "ngrams": 4, "budget": 24, "draft": "partial"}
    return [
        llm.generate(PROMPT, 24, strategy, given, params, ignore_eos=True).token_ids
        for params in (GREEDY, SAMPLED)
        for strategy, given in (("autoregressive", None), ("tokenswift", options))
    ]


@pytest.mark.parametrize(
    ("family", "changes"),
    [(family, {"tie_word_embeddings": True}) for family in FAMILIES]
    + [(family, {"vocab_size": 263}) for family in PLAIN]
    + [rare(family, {"vocab_size": 263}) for family in SWITCHED],
)
def test_files_give_what_transformers_gives(
    save: Callable[..., Path], family: str, changes: dict[str, Any]
) -> None:
    first, second = both(save(family, **changes))
    assert texts(first) == texts(second)
    assert first.resources.identity() == second.resources.identity()
    assert first.target.numerics() == second.target.numerics()
    assert first.source.end_tokens() == second.source.end_tokens() == {257}
    assert isinstance(first.target, NativeTarget)
    assert isinstance(second.target, NativeTarget)
    assert first.target.layout == second.target.layout
    assert second.target.copied_bytes == 0
    sizes = [(llm.target.weight_bytes, llm.target.windows) for llm in (first, second)]
    assert sizes[0] == sizes[1]
    assert all(
        map(torch.equal, *(llm.target.rotary.angles(torch.arange(40)) for llm in (first, second)))
    )
    assert first.source.host.base.distance(second.source.host.base) == 0


@pytest.mark.parametrize(("stored", "wanted"), [("float32", "bfloat16"), ("bfloat16", "auto")])
def test_types_and_shards(
    save: Any, stored: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("qwen2", shard="20KB", dtype=stored)
    assert len(list(folder.glob("*.safetensors"))) > 1
    opened: list[Path] = []

    def counting(path: Path, **options: Any) -> Any:
        opened.append(path)
        return safetensors.safe_open(path, **options)

    monkeypatch.setattr(safetensors_file, "safe_open", counting)
    first, second = both(folder, dtype=wanted)
    assert sorted(path for path in opened if path.parent == folder) == sorted(
        folder.glob("*.safetensors")
    )
    assert first.dtype == second.dtype == "bfloat16"
    assert texts(first) == texts(second)
    assert first.resources.identity() == second.resources.identity()


def test_files_that_changed_are_not_mixed(save: Callable[..., Path]) -> None:
    folder = save()
    first, second = both(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for attribute in ("model", "tokenizer"):
        with pytest.raises(InputError, match="has changed since the model was loaded"):
            getattr(second, attribute)
    assert texts(second) == texts(first)  # it has its weights
    third = LLM(folder, device="cpu", heads="none")
    assert isinstance(third.source, FromFiles)
    assert third.resources.identity() != first.resources.identity()


def test_what_goes_through_transformers(save: Callable[..., Path]) -> None:
    folder = save(hidden_act="gelu")  # not the native decoder's
    assert type(LLM(folder, device="cpu", heads="none").source) is FromModel
    for more in ({"unheard": 1}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        folder = save()
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
        assert completed("llama", json.loads(path.read_text())) is None
    folder = save()
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)  # transformers leaves it out
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert type(LLM(folder, device="cpu", heads="none").source) is FromModel


# ---- configs and tokenizers ----------------------------------------------------------------------


@pytest.mark.parametrize(("make", "kind"), [(tiny_tokenizer, "llama"), (chat_tokenizer, "qwen3")])
def test_plain_tokenizers_do_as_transformers(
    make: Callable[[], Any], kind: str, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    real = AutoTokenizer.from_pretrained(tmp_path)
    plain = read(tmp_path, kind)
    assert plain is not None
    assert tokenizer_digest(plain) == tokenizer_digest(real)
    assert plain.special_tokens_map == real.special_tokens_map
    assert plain.get_vocab() == real.get_vocab()
    assert (plain.bos_token_id, plain.eos_token_id) == (real.bos_token_id, real.eos_token_id)
    for text in ("Hi", "", "<s>Hi</s> there", "abba Grüße, \U0001f600\n", "<s>", "<|im_end|>"):
        assert plain(text)["input_ids"] == real(text)["input_ids"]
        bare = real(text, add_special_tokens=False)["input_ids"]
        assert plain(text, add_special_tokens=False)["input_ids"] == bare
        assert plain.decode(bare) == real.decode(bare)
        assert [plain.convert_ids_to_tokens(token) for token in bare] == real.convert_ids_to_tokens(
            bare
        )
    if real.chat_template is not None:
        chat = [{"role": "user", "content": "a", "name": "b"}]  # more than a role and a text
        written = real.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for tokenizer in (plain, real):
            assert (
                prompt_ids(chat, tokenizer, 260)
                == real(written, add_special_tokens=False)["input_ids"]
            )


# ---- what is imported, and packing ---------------------------------------------------------------

#: what takes long to load, or is for other commands
HEAVY = {
    *(
        "transformers",
        "accelerate",
        "sympy",
        "torch._dynamo",
        "torch._inductor",
        "numpy.testing",
        "regex",
    ),
    *(
        "prompt_toolkit",
        "rich",
        "ray",
        "fastapi",
        "datasets",
        "pandas",
        "matplotlib",
        "jinja2",
        "llguidance",
    ),
    *(
        "huggingface_hub",
        "tokenswift.serve",
        "tokenswift.train",
        "tokenswift.audit",
        "tokenswift.cli.chat",
    ),
}
DRIVER = """
import sys
from tokenswift.cli.main import main
code = main(sys.argv[1:])
print("loaded:", *sys.modules)
raise SystemExit(code)
"""


def imported(*argv: object) -> tuple[str, set[str]]:
    """What the command line wrote, and which of :data:`HEAVY` it imported."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    text, _, names = done.stdout.rpartition("loaded:")
    return text, HEAVY & set(names.split())


def test_a_start_imports_nothing_that_it_does_not_use(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    """Neither with a folder, whose chat is rendered in another process, nor with a GGUF file."""
    folder = save("llama", chat_tokenizer())
    call = ("generate", "Hi", "--model", folder, "--max-new-tokens", 24, "--quiet", "--ignore-eos")
    text, names = imported(*call, "--run-dir", tmp_path / "run")
    assert text
    assert not names
    write(tmp_path / "model.gguf", small(), {"attn_q": QuantType.Q4_1}, tokenizer=chat_tokenizer())
    text, names = imported(*call[:3], tmp_path / "model.gguf", *call[4:])
    assert text
    assert not names
