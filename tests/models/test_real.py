"""A real model of 0.5B in Q4_K_M (tensors of Q5_0, Q8_0, Q6_K and Q4_K), fetched when the slow
tests run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.answers import PALINDROME, QUESTIONS, parting
from benchmarks.fetch import fetched
from benchmarks.needs import FETCHED
from tests.default_model import default_llm
from tokenswift import LLM, SamplingParams
from tokenswift.audit.logits import IN_FLOATS
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.quality import compared, judged

CHAPTER = Path(__file__).with_name(
    "two-cities.txt"
)  # the first of A Tale of Two Cities (Dickens, 1859)
#: of the chapter's 1,270 tokens in float32, as transformers 5.23 says of the unpacked weights
PERPLEXITY = 70.7003


@pytest.fixture(scope="module")
def file() -> Path:
    return fetched("qwen2.5-coder-0.5b-q4_k_m")


def perplexity(llm: LLM, count: int = 1270) -> float:
    """Of the chapter, which has so many tokens, read in passes of 512 rows."""
    ids = torch.tensor(llm.encode(CHAPTER.read_text(encoding="utf-8")))
    target = llm.target
    assert len(ids) == count
    assert isinstance(target, NativeTarget)
    cache = target.new_cache(len(ids))
    logits = []
    for start in range(0, len(ids), 512):
        rows = ids[start : start + 512]
        places = torch.arange(start, start + len(rows))
        logits.append(target.logits(target.forward(rows, places, cache, None).hidden))
        cache.commit(tuple(range(len(rows))))
    return float(torch.nn.functional.cross_entropy(torch.cat(logits)[:-1].double(), ids[1:]).exp())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "far"),
    [
        ({"dtype": "float32"}, 1e-5),
        ({"dtype": "int8", "kv_cache_dtype": "bfloat16"}, 5e-3),
        ({}, 5e-3),
        ({"kv_cache_dtype": "int16"}, 5e-3),
        # its keys have channels of very large values, which scales of a whole head lose
        ({"dtype": "int8", "kv_cache_dtype": "int8"}, 6e-2),
    ],
    ids=["float32", "int8 products", "auto", "int16 keys", "int8 keys"],
)
def test_perplexity_is_the_unpacked_models(file: Path, kinds: dict[str, Any], far: float) -> None:
    assert abs(perplexity(LLM(str(file), device="cpu", **kinds)) / PERPLEXITY - 1) < far


#: model → the layers whose keys have 16 bits, how much perplexity may rise, and the least share of
#: places with the same most probable token, over the chapter
JUDGED = {
    "qwen2.5-coder-1.5b-q4_k_m": ({0, 1, 7, 15}, 1.002, 0.97),
    "qwen2.5-coder-0.5b-q4_k_m": ({0, 1, 2, 4, 8}, 1.002, 0.96),
    "gemma-3-270m-q4_k_m": ({2, 5, 11}, 1.004, 0.95),
    "smollm2-135m": (set[int](), 1.004, 0.94),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", JUDGED)
def test_int8_writes_as_well_as_float32(model: str) -> None:
    """Of the layers those that must have keys of 16 bits; of perplexity two standard errors."""
    layers, ratio, same = JUDGED[model]
    llm = LLM(str(fetched(model)) if model in FETCHED else model, device="cpu", dtype="int8")
    target = llm.target
    assert isinstance(target, NativeTarget)
    assert layers <= set(target.wide_layers)
    ids = llm.encode(CHAPTER.read_text(encoding="utf-8"))[:1200]
    in_int8 = judged(target, ids, 1100)
    with target.computing(IN_FLOATS):
        in_floats = judged(target, ids, 1100)
    quality = compared([in_int8], [in_floats])
    assert quality.ratio - 2 * quality.error <= ratio, str(quality)
    assert quality.same_choice >= same, str(quality)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2.5-coder-1.5b-q4_k_m", "qwen2.5-coder-0.5b-q4_k_m"])
def test_greedy_answers_part_from_float32_at_near_ties_alone(model: str) -> None:
    llm = LLM(str(fetched(model)), device="cpu")
    for question in QUESTIONS:
        parted = parting(llm, question, 120)
        assert parted.margin < 0.5, parted


@pytest.mark.slow
def test_code_that_is_written_in_int8_compiles() -> None:
    llm = LLM(str(fetched("qwen2.5-coder-1.5b-q4_k_m")), device="cpu")
    answer = parting(llm, PALINDROME, 200).text
    code = answer.partition("```python")[2].partition("```")[0]
    space: dict[str, Any] = {}
    exec(compile(code, "answer", "exec"), space)
    assert space["is_palindrome"]("A man, a plan, a canal: Panama!")
    assert not space["is_palindrome"]("palindrome")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "far"), [("float32", 1e-5), ("auto", 5e-3)])
def test_gemma_has_the_perplexity_that_transformers_measures(dtype: str, far: float) -> None:
    """Of the unpacked weights in float32; windows of 512 are crossed. llama-cpp-python 0.3.36 says
    42.4366 of the same file, and 42.3171 with flash attention."""
    llm = LLM(str(fetched("gemma-3-270m-q4_k_m")), device="cpu", dtype=dtype)
    assert llm.dtype == ("int8" if dtype == "auto" else dtype)
    assert abs(perplexity(llm, 1242) / 42.03939 - 1) < far


@pytest.mark.slow
def test_a_greedy_text_is_the_same_by_all_strategies(file: Path) -> None:
    llm = LLM(str(file), dtype="int8", device="cpu")
    greedy = SamplingParams(greedy=True)
    plain, auto = (
        llm.generate(
            "def quicksort(items):", 200, strategy=strategy, sampling=greedy, ignore_eos=True
        )
        for strategy in ("autoregressive", "auto")
    )
    assert plain.token_ids == auto.token_ids
    assert len(plain.token_ids) == 200
    assert hashlib.sha256(plain.text.encode()).hexdigest()[:16] == "eea3bc6751116d12"


def test_the_readme_shows_what_the_default_model_answers() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    question = "Explain in two sentences why we sleep."
    blocks = readme.split(f'tokenswift generate "{question}"')[1].split("```")
    shown = blocks[2].removeprefix("text\n")
    answer = default_llm("int8").generate([{"role": "user", "content": question}], 100)
    assert answer.finish_reason == "eos"
    assert " ".join(shown.split()) == answer.text
