"""``tokenswift generate --prompts FILE --ray ADDRESS``: the texts of a file, written by a Ray cluster."""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from tokenswift.cli import many, options
from tokenswift.cli.terminal import Signals, Stages, table
from tokenswift.files import is_address
from tokenswift.types import InputError
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
COLUMNS = ("node", "texts", "tokens", "resumed", "failed")


def run(args: argparse.Namespace, call: dict[str, Any]) -> int:
    """Write all texts that are missing; see `cli.many.run`."""
    at_once, prompts, record = many.prepared(args)
    for name in ("ray", "pyarrow", "fsspec"):
        if find_spec(name) is None:
            raise InputError(
                f"the package {name} is not installed; valid: pip install 'tokenswift-exact[ray]'"
            )
    out = args.out
    if is_address(out):
        from tokenswift.runs.remote import open_address

        open_address(out)
    else:
        out = str(many.check_out(out).absolute())
    from tokenswift import distributed as cluster

    settings = settings_from(args, call) | {"records": record is not None}
    requests = {one.name: one.record() for one in prompts}
    lengths = [one.more.get("max_new_tokens", args.max_new_tokens) for one in prompts]
    total = None if None in lengths else sum(lengths)
    each = at_once if isinstance(at_once, int) else None
    done: dict[str, dict[str, Any]] = {}
    stages, begun, tokens = Stages(args.quiet), perf_counter(), 0
    try:
        with Signals(), cluster.connected(args.ray):
            how = cluster.laid_out(len(prompts), args.actors, args.actor_cores, args.actor_gpus, each)
            nodes = len(cluster.nodes())
            logger.info(
                "%s; %s with %s and %s each, %s at once each",
                counted(nodes, "node"), counted(how.actors, "actor"), counted(how.cores, "core"),
                counted(how.gpus, "GPU"), counted(how.at_once, "text"),
            )  # fmt: skip
            for row in cluster.write(requests, out, how, settings):
                if isinstance(row, int):
                    if total is None:
                        stages("texts", len(done), len(prompts))
                    else:
                        stages("generate", min(row, total - 1), total)
                    before, nodes = nodes, len(cluster.nodes())
                    if nodes < before:
                        stages.end()
                        left = counted(nodes, "is", "are")
                        logger.warning("a node was lost, %s left; its texts are resumed on the others", left)
                    continue
                done[row["name"]] = row
                tokens += (row["new_tokens"] or 0) - (row["went_on_at"] or 0)
                if row["error"] is not None:
                    stages.end()
                    logger.error("%s failed: %s", row["name"], row["error"])
    except KeyboardInterrupt as interrupt:
        written = sum(row["error"] is None for row in done.values())
        raise many.interrupted(interrupt, written, len(prompts)) from None
    finally:
        stages.end()
    for line in by_node(list(done.values())).splitlines():
        logger.info("%s", line)
    failed = {name: row["error"] for name, row in done.items() if row["error"] is not None}
    records = {name: json.loads(row["record"]) for name, row in done.items() if row.get("record")}
    return many.end(args.out, record, list(requests), records, failed, tokens / (perf_counter() - begun))


def settings_from(args: argparse.Namespace, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `distributed.Generator` that the command's options are."""
    sampling = {"sampling": "model" if args.sampling == "model" else None, **options.given_sampling(args)}
    if call["sampling"].grammar is not None:
        sampling["grammar"] = call["sampling"].grammar
    loading = {**options.loading_of(args), "rope_scaling": args.rope_scaling}
    model, loading["heads"] = _whole(args.model), _whole(args.heads)
    loading["eagle"] = None if args.eagle is None else _whole(args.eagle)
    if args.threads is not None:
        loading["threads"] = args.threads
    rest = {name: value for name, value in call.items() if name != "sampling"}
    return {"model": model, "loading": loading, **rest, **sampling}


def _whole(name: str) -> str:
    """A path from the root, where there is one of that name: actors have other working folders."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def by_node(rows: Sequence[dict[str, Any]]) -> str:
    """A table of what each node has done; texts that an actor found begun are counted once more."""
    texts, tokens, taken, failed = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        node = row["node"]
        texts[node] += row["error"] is None
        failed[node] += row["error"] is not None
        tokens[node] += (row["new_tokens"] or 0) - (row["went_on_at"] or 0)
        taken[node] += 0 < (row["went_on_at"] or 0) < (row["new_tokens"] or 0)
    cells = [
        (node, str(texts[node]), f"{tokens[node]:,}", str(taken[node]), str(failed[node]))
        for node in sorted(texts)
    ]
    return table(cells, COLUMNS, right=range(1, 5))
