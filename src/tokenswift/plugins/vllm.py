"""Prompt lookup as a proposer of vLLM: drafts from each text so far, by token ids alone.

::

    vllm serve MODEL --speculative-config '{"model": "tokenswift.plugins.vllm.LookupProposer",
        "num_speculative_tokens": 8}'

vLLM verifies the drafts by its own rule, so they change its speed alone. Its interface for such classes
(``method`` "custom_class", written against version 0.33) is experimental. Nothing of vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenswift.spec.drafters.lookup import Matches


class _Text:
    """A text under way: its tokens as they were last seen, and what was learnt of them."""

    def __init__(self) -> None:
        self.tokens = np.empty(0, dtype=np.int64)
        self.matches = Matches(penalised=False)

    def goes_on_as(self, tokens: np.ndarray) -> bool:
        """Whether a text begins with this one."""
        return len(tokens) >= len(self.tokens) and np.array_equal(tokens[: len(self.tokens)], self.tokens)

    def draft(self, tokens: np.ndarray, most: int) -> list[int]:
        """What may follow: up to ``most`` tokens, none without a match."""
        new = tokens[len(self.tokens) :].tolist()
        self.matches.learn(new)
        self.matches.extend(new)
        self.tokens = tokens.astype(np.int64)
        return [token for token, _ in self.matches.predict()[:most]]


class LookupProposer:
    """What vLLM makes of its configuration and asks in every step.

    Rows of a batch change places and owners without a word, so a row's text is known by its tokens: one that
    does not go on as it did is looked for in the other rows, and read anew where it is in none.

    Args:
        vllm_config: a ``VllmConfig``; its ``num_speculative_tokens`` are drafted at most.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.most: int = vllm_config.speculative_config.num_speculative_tokens
        self.limit: int = vllm_config.model_config.max_model_len
        self._rows: list[_Text] = []

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts for each row of the batch.

        Args:
            sampled_token_ids: tokens that each row got in this step; none: it is not to be drafted for.
            num_tokens_no_spec: (rows,) lengths of the texts, these tokens included.
            token_ids_cpu: (rows, positions) their tokens.
            slot_mappings: of vLLM's cache; unused.
        """
        before: list[_Text | None] = [*self._rows]
        self._rows, drafts = [], []
        for row, sampled in enumerate(sampled_token_ids):
            tokens = token_ids_cpu[row, : num_tokens_no_spec[row]]
            known = _Text()
            for place in [*range(row, len(before)), *range(min(row, len(before)))]:  # its own first
                found = before[place]
                if found is not None and found.goes_on_as(tokens):
                    known, before[place] = found, None
                    break
            self._rows.append(known)
            most = min(self.most, self.limit - len(tokens))
            drafts.append(known.draft(tokens, most) if len(sampled) and most > 0 else [])
        return drafts
