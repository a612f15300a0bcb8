"""Known defects, planted one at a time by mutations.py: the tests named with each have to fail."""

from __future__ import annotations

from dataclasses import dataclass

LAW = "tests/lossless/test_law.py"
TOKENS = "tests/lossless/test_tokens.py::test_tiny_models_of_every_family"
REFERENCE = "tests/test_audit_reference.py"
VERDICT = "tests/test_audit_report.py"
DIVERGENCES = "tests/test_audit.py::test_a_tie_between_passes_that_are_both_wrong_is_no_near_tie"


@dataclass(frozen=True)
class Defect:
    """One planted defect: ``old`` occurs exactly once in ``file`` and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


DEFECTS = [
    Defect(
        "chunks of attention do not end at absolute positions",
        "kernels/cpu_attention.h",
        "width = a->width, start = c * CHUNK;",
        "width = a->width, start = c ? c * CHUNK - a->before % CHUNK : 0;",
        ("tests/test_kernels.py::test_a_row_of_attention_has_its_own_bits",),
    ),
    Defect(
        "kernels ignore sliding windows",
        "kernels/cpu_attention.h",
        "low[i] = a->window ? clampl(place - a->window, 0, CHUNK) : 0;",
        "low[i] = 0;",
        ("tests/test_kernels.py", "tests/test_target.py"),
    ),
    Defect(
        "a row of the kernels sees the node after its own",
        "kernels/cpu_attention.h",
        "        end[i] = clampl(place, 0, CHUNK);",
        "        end[i] = clampl(place + (a->parents == 0), 0, CHUNK);",
        ("tests/test_kernels.py",),
    ),
    Defect(
        "a product of a single row adds up in another way",
        "kernels/cpu.c",
        "            if (direct) continue;",
        "            if (n == 1)\n"
        "                for (int c = 0; c < cols; c++) to[c] = (direct ? to : sums)[c] * 1.0000001f;\n"
        "            if (direct) continue;",
        ("tests/test_kernels.py::test_rows_of_a_product_do_not_know_of_each_other",),
    ),
    Defect(
        "scratch memory of the kernels is shared by all sequences",
        "kernels/native.py",
        "    before, capacity = cache.length, cache.data.shape[2]\n",
        "    before, capacity = cache.length, cache.data.shape[2]\n"
        "    cache.work = _pass.__dict__.setdefault('work', torch.empty(1 << 24, dtype=torch.uint8))\n",
        ("tests/test_guest.py::test_threads_write_what_they_would_write_alone",),
    ),
    Defect(
        "Mistral's window is not read",
        "models/decoder.py",
        '        if self.config.model_type == "mistral":',
        '        if self.config.model_type == "none":',
        ("tests/test_target.py",),
    ),
    Defect(
        "second chunk of the prefill at wrong positions",
        "models/base.py",
        "            positions = torch.arange(cache.length, cache.length + len(rows), device=self.device)",
        "            positions = torch.arange(cache.length, cache.length + len(rows)) + 7 * (start > 0)",
        ("tests/test_target.py",),
    ),
    Defect(
        "frequencies that depend on a pass are accepted",
        "models/rope.py",
        'BY_LENGTH = ("dynamic", "longrope")',
        "BY_LENGTH = ()",
        ("tests/test_rope.py",),
    ),
    Defect(
        "YaRN changes the caller's model",
        "models/rope.py",
        "    scaled = copy.deepcopy(config)",
        "    scaled = config",
        ("tests/test_rope.py", "tests/test_guest.py"),
    ),
    Defect(
        "YaRN's factor without a number follows the model alone, not the stated length",
        "models/rope.py",
        "needed_factor(context_limit(config) or limit, STATED_POSITIONS)",
        "needed_factor(context_limit(config) or limit, 1)",
        ("tests/test_rope.py",),
    ),
    Defect(
        "the caller's model gets our attention",
        "models/generic.py",
        "        shadow = copy.deepcopy(model, shared)",
        "        shadow = model",
        ("tests/test_guest.py",),
    ),
    Defect(
        "a model that fails its check is used all the same",
        "models/target.py",
        "    if far > TOLERANCES.get(target.dtype, 0.1):",
        "    if far > 1e9:",
        ("tests/test_families.py",),
    ),
    Defect(
        "a damaged library is loaded",
        "kernels/build.py",
        "            hashlib.sha256(path.read_bytes()).hexdigest()\n            != ",
        "            '' == ",
        ("tests/test_kernels.py::test_a_damaged_library_is_made_again",),
    ),
    Defect(
        "penalty window does not slide along a path",
        "sampling.py",
        "        drops.append(min(over, len(tail)))\n        extras.append(extra + [filler]",
        "        drops.append(0)\n        extras.append([filler] * len(extra) + [filler]",
        ("tests/test_sampling.py", LAW),
    ),
    Defect(
        "penalty window does not slide (one row)",
        "sampling.py",
        "        known = tail + paths[0]\n",
        "        known = list(tail)\n",
        ("tests/test_sampling.py", LAW),
    ),
    Defect(
        "penalty window one token too long",
        "sampling.py",
        "        ids = known[max(0, len(known) + gaps[0] - window) :]",
        "        ids = known[max(0, len(known) + gaps[0] - window - 1) :]",
        ("tests/test_sampling.py", LAW),
    ),
    Defect(
        "noise shared between positions",
        "noise.py",
        "    return mix64(mix64(seed + _GOLDEN) + position * _POSITION)",
        "    return mix64(mix64(seed + _GOLDEN) + _POSITION)",
        ("tests/test_noise.py",),
    ),
    Defect(
        "noise shared between positions, seen by the law alone",
        "noise.py",
        "    return mix64(mix64(seed + _GOLDEN) + position * _POSITION)",
        "    return mix64(mix64(seed + _GOLDEN) + _POSITION)",
        (LAW,),
    ),
    Defect(
        "noise shared between tokens and positions (token + position)",
        "noise.py",
        "    words = tokens.mul(_signed(_GOLDEN))\n    words.add_(_signed(position_key(seed, position)))",
        "    words = (tokens + position).mul_(_signed(_GOLDEN))\n"
        "    words.add_(_signed(position_key(seed, 0)))",
        ("tests/test_noise.py",),
    ),
    Defect(
        "draws per path used as the exact rule",
        "decode.py",
        "                accepted = accept_exact(tree, logits, sequence.tokens, sampler, all_rows=on_gpu)",
        "                accepted = accept_published(tree, logits, sequence.tokens, sampler)",
        (TOKENS,),
    ),
    Defect(
        "wrong position of a node",
        "decode.py",
        "positions = torch.tensor(tree.depths, device=model.device) + root_position",
        "positions = torch.arange(len(tree), device=model.device) + root_position",
        (TOKENS,),
    ),
    Defect(
        "root one position too early",
        "decode.py",
        "            root_position = len(sequence.tokens) - 1",
        "            root_position = max(0, len(sequence.tokens) - 2)",
        ("tests/test_decode.py",),
    ),
    Defect(
        "stale partial-cache row leaks into the full cache",
        "cache/sparse.py",
        "        self._put(full.data[:, :, start:end], start)",
        "        full.data[:, :, start:end] = self.data[:, :, : end - start]",
        ("tests/test_cache.py", TOKENS),
    ),
    Defect(
        "draft pass commits to the full cache",
        "strategies/tokenswift.py",
        "        sequence.draft_passes += 1\n        return result.hidden",
        "        sequence.draft_passes += 1\n        sequence.cache.commit((0,))\n"
        "        return result.hidden",
        (TOKENS,),
    ),
    Defect(
        "draft branch accepted without verification",
        "accept.py",
        "        child = below[node].get(token)\n",
        "        child = below[node].get(token) or next(iter(below[node].values()), None)\n",
        ("tests/test_accept.py", LAW),
    ),
    Defect(
        "n-gram branch accepted without verification",
        "accept.py",
        "        child = below[node].get(token)\n",
        "        grams = [c for c in below[node].values() if tree.ngram[c]]\n"
        "        child = below[node].get(token) or (grams[0] if grams else None)\n",
        ("tests/test_accept.py", TOKENS),
    ),
    Defect(
        "off by one in compaction",
        "cache/full.py",
        "            rows = torch.tensor(nodes[kept:], device=self.data.device) + start\n",
        "            rows = torch.tensor(nodes[kept:], device=self.data.device) + start - 1\n",
        ("tests/test_cache.py",),
    ),
    Defect(
        "compaction skipped",
        "cache/full.py",
        "        if kept < len(nodes):\n",
        "        if False:\n",
        ("tests/test_cache.py",),
    ),
    Defect(
        "compaction skipped, seen by token equality alone",
        "cache/full.py",
        "        if kept < len(nodes):\n",
        "        if False:\n",
        (TOKENS,),
    ),
    Defect(
        "rejected row kept by the commit",
        "cache/full.py",
        "        self._length = start + len(nodes)",
        "        self._length = start + len(nodes) + (len(nodes) > 2)",
        (TOKENS,),
    ),
    Defect(
        "node does not see its parent",
        "tree.py",
        "        row = bytearray(rows[parent]) if parent >= 0 else bytearray(len(parents))\n"
        "        row[node] = 1",
        "        row = bytearray(rows[parent]) if parent >= 0 else bytearray(len(parents))\n"
        "        row[parent] = 0\n        row[node] = 1",
        ("tests/test_tree.py",),
    ),
    Defect(
        "siblings see each other",
        "tree.py",
        "        row[node] = 1\n",
        "        row[: node + 1] = b'\\x01' * (node + 1)\n",
        ("tests/test_tree.py",),
    ),
    Defect(
        "a node sees a sibling instead of its ancestor, seen by token equality alone",
        "kernels/cpu_attention.h",
        "s[j] = w->node[r * stride + node];",
        "s[j] = w->node[r * stride + (node > 1 ? node - 1 : node)];",
        (TOKENS,),
    ),
    Defect(
        "the last accepted row is not kept",
        "decode.py",
        "            nodes = accepted.nodes[: len(new)]",
        "            nodes = accepted.nodes[: max(1, len(new) - 1)]",
        ("tests/test_decode.py",),
    ),
    Defect(
        "a rejected branch that cannot be chosen from ends the run",
        "accept.py",
        "            choices = None\n    nodes = [0]",
        "            raise\n    nodes = [0]",
        ("tests/test_accept.py",),
    ),
    Defect(
        "a row of the walk goes unchecked",
        "sampling.py",
        "        if not math.isfinite(values[best[0]]):\n            _refuse(row, position)\n",
        "",
        ("tests/test_accept.py",),
    ),
    Defect(
        "published rule: the first of tied paths always wins",
        "accept.py",
        "    winner = 0 if _tie_break(sampler.params.seed, len(history)) else -1",
        "    winner = 0",
        ("tests/test_accept.py",),
    ),
    Defect(
        "published rule: the first of tied paths always wins, seen by the closed form alone",
        "accept.py",
        "    winner = 0 if _tie_break(sampler.params.seed, len(history)) else -1",
        "    winner = 0",
        ("tests/test_audit.py",),
    ),
    Defect(
        "published rule: a branch that repeats a path has no draw of its own",
        "tree.py",
        "[*leaves, *tree.branches]] or [[0]]",
        "[*leaves, *(end for end in tree.branches if tree.ngram[end])]] or [[0]]",
        ("tests/test_accept.py",),
    ),
    Defect(
        "published rule: the best ranked path stands first",
        "tree.py",
        "    leaves.sort(key=lambda node: (tree.depths[node], node), reverse=True)",
        "    leaves.sort(key=lambda node: (tree.depths[node], node))",
        ("tests/test_accept.py",),
    ),
    Defect(
        "published rule: paths share their draws",
        "accept.py",
        "    numbers = torch.tensor(paths, device=scores.device)",
        "    numbers = torch.zeros(len(paths), dtype=torch.long, device=scores.device)",
        ("tests/test_audit.py",),
    ),
    Defect(
        "closed form of the published rule: ties go to the first path",
        "audit/law.py",
        "            wins = reach[i][length] * (first + last) / 2",
        "            wins = reach[i][length] * first",
        ("tests/test_audit.py",),
    ),
    Defect(
        "audit: an error that all passes share is sound",
        "audit/passes.py",
        "for passes in (self.one_row, self.tree))",
        "for passes in ())",
        (REFERENCE,),
    ),
    Defect(
        "audit: one-row passes are not compared with the reference",
        "audit/passes.py",
        "for passes in (self.one_row, self.tree))",
        "for passes in (self.tree,))",
        (REFERENCE,),
    ),
    Defect(
        "audit: a pass may be off nearly everywhere, if never far",
        "audit/reference.py",
        " and distance.typical <= self.allowed.typical",
        "",
        (REFERENCE,),
    ),
    Defect(
        "audit: transformers' pass in its own dtype is the reference",
        "audit/reference.py",
        "    with _Finer(low, high):\n",
        "    if True:\n",
        (REFERENCE,),
    ),
    Defect(
        "audit: the toy has no small window",
        "audit/toy.py",
        '    if config.get("sliding_window"):\n',
        "    if False:\n",
        (REFERENCE,),
    ),
    Defect(
        "audit: the toy's prompt is within a chunk",
        "audit/toy.py",
        "(PREFILL_CHUNK + 5,)",
        "(PREFILL_CHUNK - 5,)",
        (REFERENCE,),
    ),
    Defect(
        "audit: verdict ignores law p-values",
        "audit/report.py",
        "            if test.p < LAW_LIMIT:\n",
        "            if False:\n",
        (VERDICT,),
    ),
    Defect(
        "audit: verdict ignores runs that differ from plain decoding",
        "audit/report.py",
        "            if test.same is not None and test.same < test.samples:\n",
        "            if False:\n",
        (VERDICT,),
    ),
    Defect(
        "audit: verdict ignores the published control",
        "audit/report.py",
        "            if test.p >= BIAS_LIMIT:\n",
        "            if False:\n",
        (VERDICT,),
    ),
    Defect(
        "audit: verdict ignores the numeric error of the texts",
        "audit/report.py",
        "for i, error in enumerate(self.errors, 1)]",
        "for i, error in enumerate([], 1)]",
        (VERDICT,),
    ),
    Defect(
        "audit: verdict ignores the numeric error of the toy",
        "audit/report.py",
        "        measured += [(",
        "        _ = [(",
        (VERDICT,),
    ),
    Defect(
        "audit: near-tie ignores reproduced",
        "audit/equality.py",
        "        passes = self.reproduced and self.shift <= bound",
        "        passes = self.shift <= bound",
        (VERDICT,),
    ),
    Defect(
        "audit: near-tie ignores the reference",
        "audit/equality.py",
        "        return passes and self.off <= self.allowed and self.reference_shift <= 2 * bound",
        "        return passes",
        (DIVERGENCES, VERDICT),
    ),
    Defect(
        "audit: near-tie ignores the reference, seen by texts alone",
        "audit/equality.py",
        "        return passes and self.off <= self.allowed and self.reference_shift <= 2 * bound",
        "        return passes",
        (DIVERGENCES,),
    ),
    Defect(
        "audit: headline silent on near-ties",
        "audit/report.py",
        "        ties = len(self.near_ties)\n",
        "        ties = 0\n",
        (VERDICT,),
    ),
    Defect(
        "audit: a skipped strategy counts as passed",
        "audit/report.py",
        "            if c.strategy not in self.skipped and (",
        "            if (",
        (VERDICT,),
    ),
    Defect(
        "audit: headline silent on skipped strategies",
        "audit/report.py",
        '        return text + (f"; not run: {\', \'.join(self.skipped)}" if self.skipped else "")',
        "        return text",
        (VERDICT,),
    ),
]
