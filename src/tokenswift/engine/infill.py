"""Filling in: the request for the text that stands between two others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from tokenswift.checks import check_text, shown
from tokenswift.config.sampling import SamplingParams
from tokenswift.config.strategies import Strategy
from tokenswift.engine.arguments import GenerationArguments
from tokenswift.engine.request import Request
from tokenswift.loader.apart import encoded, set_apart
from tokenswift.loader.errors import refused_as
from tokenswift.loader.infill_marks import FAMILIES, Marks, marks_of, token_id
from tokenswift.speculation.resources import Resources
from tokenswift.tokenizer import Tokenizer
from tokenswift.types import InputError

#: where no sampling is given: the likeliest text, without a penalty, which would break code
FILLING = SamplingParams(temperature=0, min_p=0, repetition_penalty=1.0)
NEW_TOKENS = 256  # where no number is given
#: names that nobody has given: of a repository, and of the file with the gap
REPOSITORY = "project"
FILE = "file"


@dataclass(frozen=True)
class Infill:
    """A gap in a text.

    Attributes:
        prefix: the text before it.
        suffix: the text behind it.
        extra: other files as names and texts, the nearest last.
        begun: what the text in the gap begins with.
    """

    prefix: str
    suffix: str
    extra: Sequence[tuple[str, str]] = ()
    begun: str = ""

    def __post_init__(self) -> None:
        for name in ("prefix", "suffix", "begun"):
            text = getattr(self, name)
            if not isinstance(text, str):
                raise InputError(f"{name} is {shown(text)}; valid: text", name)
            check_text(name, text)
        if not isinstance(self.extra, list | tuple):
            valid = "a list of pairs of a name and a text"
            raise InputError(f"extra is {shown(self.extra)}; valid: {valid}", "extra")
        for number, file in enumerate(self.extra):
            texts = file if isinstance(file, list | tuple) else ()
            if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
                valid = "a name and a text"
                raise InputError(f"extra[{number}] is {shown(file)}; valid: {valid}", "extra")


def infill_request(
    resources: Resources,
    gap: Infill,
    max_new_tokens: int | None = None,
    strategy: Strategy | str = "auto",
    strategy_options: Mapping[str, object] | None = None,
    sampling: SamplingParams | None = None,
    **options: Unpack[GenerationArguments],
) -> Request:
    """The request for the text in a gap, which ends at the next mark, too.

    The arguments after ``gap`` are those of ``LLM.generate``.

    Raises:
        InputError: the model has no marks; as for ``LLM.generate``.
    """
    tokenizer = resources.source.tokenizer
    marks = marks_of(tokenizer)
    if tokenizer is None or marks is None:
        examples = ", ".join({marks.prefix: "" for marks in FAMILIES.values()})
        raise InputError(
            f"suffix is given, but the model has no marks for filling in (such as {examples}); "
            "valid: a prompt alone, or a model that fills in, such as Qwen2.5-Coder",
            "suffix",
        )
    ids = infill_ids(gap, marks, tokenizer)
    stop = options.get("stop", ())
    stops: list[str | Sequence[int]] = [stop] if isinstance(stop, str) else [*stop]
    ends = {token_id(tokenizer, name) for name in marks.names}
    stops += ([end] for end in sorted(end for end in ends if end is not None))
    return Request.of(
        ids,
        lambda _: FILLING,
        NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        strategy,
        strategy_options,
        sampling,
        **{**options, "stop": stops},
    )


def infill_ids(gap: Infill, marks: Marks, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text with a gap at its end; control tokens in the texts are text."""
    texts = [[gap.prefix, gap.suffix, gap.begun], *(list(file) for file in gap.extra)]
    (parts, *extra), sign = set_apart(texts, tokenizer)
    prefix, suffix, begun = parts
    before = ""
    if not marks.file:
        prefix = "".join(f"{text}\n\n" for _, text in extra) + prefix
    elif extra:
        before = f"{marks.repository}{REPOSITORY}\n" if marks.repository else ""
        before += "".join(f"{marks.file}{name}\n{text}\n" for name, text in extra)
        _, dot, kind = extra[-1][0].rpartition(".")
        before += f"{marks.file}{FILE}{dot}{kind if dot else ''}\n"
    text = f"{before}{marks.prefix}{prefix}{marks.suffix}{suffix}{marks.middle}{begun}"
    encode = partial(_encoded, tokenizer=tokenizer)
    first = encode("", add_special_tokens=True)
    begin = getattr(tokenizer, "bos_token_id", None)
    ids = encoded(text, tokenizer, encode, sign)
    return [begin, *ids] if begin is not None and first[:1] == [begin] else ids


def _encoded(text: str, tokenizer: Tokenizer, add_special_tokens: bool = False) -> list[int]:
    with refused_as("the model's tokenizer refuses the text"):
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
