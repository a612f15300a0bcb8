"""What a model is called for clients of a server."""

from __future__ import annotations

import pytest

from tokenswift.loader.find import short_name

SNAPSHOT = f"/hub/models--owner--a-name/snapshots/{'0a' * 20}"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("owner/a-name", "a-name"),
        ("/models/mine", "mine"),
        ("/models/mine/tiny-Q4_0.gguf", "tiny-Q4_0.gguf"),
        (SNAPSHOT, "owner/a-name"),
        (f"{SNAPSHOT}/", "owner/a-name"),
        (f"{SNAPSHOT}/tiny-Q4_0.gguf", "tiny-Q4_0.gguf"),
        ("/hub/models--gpt2/snapshots/" + "f" * 40, "gpt2"),
        (f"/models/mine/{'f' * 40}", "mine"),
    ],
)
def test_a_model_is_never_named_by_a_digest(model: str, name: str) -> None:
    assert short_name(model) == name
