"""What a cluster of this machine's cores costs over one process, for the same texts.

    python bench/cluster.py FOLDER [TOKENS]

Twelve prompts, by one process with all cores and by actors with one core each (``--ray local``), into two
folders below FOLDER. Start-up (Ray, loading) is left out: the time is that from the first journal's beginning
to the last one's end. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tokenswift.runs import folder as folders


def main(place: str, tokens: str = "400") -> None:
    """Run both, compare the tokens, and print the times."""
    folder = Path(place)
    folder.mkdir(parents=True)
    lines = [{"id": f"t{i:02}", "prompt": f"The story of number {i} begins", "seed": i} for i in range(12)]
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    cores = len(os.sched_getaffinity(0))
    ways = {"process": (), "ray": ("--ray", "local", "--actors", str(cores), "--actor-cores", "1")}
    seconds, texts = {}, {}
    for way, more in ways.items():
        how = ("--prompts", str(folder / "p.jsonl"), "--max-new-tokens", tokens, "--ignore-eos")
        command = [sys.executable, "-m", "tokenswift", "generate", *how, "--out", str(folder / way), *more]
        subprocess.run(command, check=True)
        states = [folders.load(path)[1] for path in sorted((folder / way).glob("t*"))]
        ends = [state.end.time for state in states if state.end is not None]
        seconds[way] = max(ends) - min(state.sessions[0].time for state in states)
        texts[way] = [state.tokens for state in states]
    overhead = seconds["ray"] / seconds["process"] - 1
    same = texts["ray"] == texts["process"]
    print(json.dumps({"cores": cores, "seconds": seconds, "overhead": round(overhead, 3), "same": same}))


if __name__ == "__main__":
    main(*sys.argv[1:])
