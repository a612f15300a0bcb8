"""HEAD requests, by which monitors and proxies ask whether a server is there."""

from __future__ import annotations

import httpx
import pytest

from tests.serve.conftest import Running, Start


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models"])
def test_head_is_get_without_a_body(server: Running, path: str) -> None:
    got = server.get(path)
    head = httpx.head(f"{server.url}{path}", timeout=60)
    assert head.status_code == got.status_code == 200
    assert head.content == b""
    for name in ("content-type", "content-length"):
        assert head.headers[name] == got.headers[name]


def test_head_needs_the_key_that_get_needs(start: Start) -> None:
    url = start(api_key="0123456789abcdef").url
    assert httpx.head(f"{url}/v1/models", timeout=60).status_code == 401
    assert httpx.head(f"{url}/health", timeout=60).status_code == 200


def test_head_is_in_no_description(server: Running) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    assert not any("head" in path for path in paths.values())
    assert "post" in paths["/infill"]
