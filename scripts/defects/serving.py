"""Defects of the server."""

from __future__ import annotations

from defects.defect import Defect

GOING_ON, GUARD, OPENAI = (f"tests/serve/test_{name}.py" for name in ("going_on", "guard", "openai"))

SERVING = (
    Defect(
        "server: a client that is gone does not cancel",
        "serve/answers.py",
        "            self._stop(answer, GONE)\n        self.shelf.shed()",
        "            pass\n        self.shelf.shed()",
        (f"{GOING_ON}::test_a_client_that_is_gone_ends_the_steps",),
    ),
    Defect(
        "server: answers of the background end with their reader",
        "serve/answers.py",
        "if not answer.readers and not answer.background:",
        "if not answer.readers:",
        (f"{GOING_ON}::test_an_answer_of_the_background_goes_on",),
    ),
    Defect(
        "server: an answer that goes on keeps what it had, so that tokens come twice",
        "serve/answers.py",
        "                part.rewind(state)\n                part.over, part.ticket",
        "                part.over, part.ticket",
        (f"{GOING_ON}::test_disconnects",),
    ),
    Defect(
        "server: an Idempotency-Key joins whatever was asked with it",
        "serve/answers.py",
        "answer.record.digest != digest",
        "not answer.record.digest",
        (f"{GOING_ON}::test_retries_join_the_run_that_exists",),
    ),
    Defect(
        "server: starting_after is off by one",
        "serve/response.py",
        "numbers.newest += first",
        "numbers.newest += max(0, first - 1)",
        (f"{OPENAI}::test_a_stream_is_taken_up_at_every_place",),
    ),
    Defect(
        "server: keys are compared by their first 16 characters",
        "serve/guard.py",
        "hashlib.sha256(key.encode()).digest()",
        "hashlib.sha256(key[:16].encode()).digest()",
        (f"{GUARD}::test_the_key",),
    ),
    Defect(
        "server: a body without a length is read whole",
        "serve/guard.py",
        "                    if size > most:",
        "                    if not most:",
        (f"{GUARD}::test_limits",),
    ),
    Defect(
        "server: a text that has ended keeps the others of its request from being stopped",
        "serve/answers.py",
        "if part.ticket is not None:  # not yet over",
        "if answer.parts[0].ticket is not None:",
        (f"{GUARD}::test_a_reader_leaves_when_one_of_two_texts_has_ended",),
    ),
    Defect(
        "server: an answer that the end refuses is kept",
        "serve/answers.py",
        "                if not answer.begun:\n",
        "                if not answer.begun and not self.closing:\n",
        (f"{GUARD}::test_the_server_ends_before_an_answer_has_begun",),
    ),
    Defect(
        "server: log-probabilities of a stream begin with the text's",
        "serve/wire.py",
        "logprobs(answer, part, start, end)",
        "logprobs(answer, part, 0, end)",
        (f"{OPENAI}::test_logprobs_of_a_chat",),
    ),
    Defect(
        "log-probabilities: every token of a step has the first one's context",
        "engine/step.py",
        "paths = [new[:depth] for depth in range(len(new))]",
        "paths = [[] for _ in new]",
        ("tests/sampling/test_logprobs.py::test_logprobs",),
    ),
    Defect(
        "log-probabilities: of the tree's first rows",
        "engine/step.py",
        "sampler.logprobs(logits[[*nodes]]",
        "sampler.logprobs(logits[: len(nodes)]",
        ("tests/sampling/test_logprobs.py::test_logprobs",),
    ),
    Defect(
        "log-probabilities: of the logits as they are",
        "sampling/choice.py",
        "known = self.scores(logits, history, paths).log_softmax(-1)",
        "known = logits.log_softmax(-1)",
        ("tests/sampling/test_logprobs.py::test_logprobs",),
    ),
    Defect(
        "server: prompts are logged",
        "serve/guard.py",
        "if self._settings.log_prompts and body:",
        "if body:",
        (f"{GUARD}::test_prompts_are_never_in_the_log",),
    ),
    Defect(
        "server: a response goes on from another key's",
        "serve/answers.py",
        'answer.record.kind != "response" or answer.record.client != client',
        'answer.record.kind != "response"',
        ("tests/serve/test_tools.py::test_a_response_belongs_to_its_key",),
    ),
    Defect(
        "server: events of calls are numbered as they are sent",
        "serve/response.py",
        "            if self.newest <= self._after:\n                continue\n",
        "            if self.newest <= self._after:\n                self.newest -= 1; continue\n",
        ("tests/serve/test_tools.py::test_events_of_a_call",),
    ),
    Defect(
        "tools: no grammar binds an answer to its calls",
        "engine/chat.py",
        "    return replace(sampling, grammar=Grammar.lark(text))",
        "    return sampling",
        ("tests/chat/test_chat.py::test_forced_calls_of_any_model",),
    ),
    Defect(
        "tools: a quote behind a backslash ends a text of a call's arguments",
        "chat/parser.py",
        "self._in_text = self._escaped or letter != '\"'",
        "self._in_text = letter != '\"'",
        ("tests/chat/test_parser.py::test_calls_in_pieces",),
    ),
    Defect(
        "server: n texts have one seed",
        "serve/schemas.py",
        "replace(sampling, seed=sampling.seed + index)",
        "sampling",
        (f"{OPENAI}::test_several_texts",),
    ),
)
