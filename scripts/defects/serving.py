"""Defects of the server."""

from __future__ import annotations

from defects.defect import Defect

GOING_ON, GUARD, OPENAI = (f"tests/serve/test_{name}.py" for name in ("going_on", "guard", "openai"))

SERVING = (
    Defect(
        "server: a client that is gone does not cancel",
        "serve/answers.py",
        "            self._stop(answer, GONE)\n        self._shed()",
        "            pass\n        self._shed()",
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
        "serve/wire.py",
        "answer.follow(max(0, after - BEFORE), ping)",
        "answer.follow(max(0, after - BEFORE - 1), ping)",
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
        "server: prompts are logged",
        "serve/guard.py",
        "if self._settings.log_prompts and body:",
        "if body:",
        (f"{GUARD}::test_prompts_are_never_in_the_log",),
    ),
    Defect(
        "server: n texts have one seed",
        "serve/schemas.py",
        'sampling["seed"] + index',
        'sampling["seed"]',
        (f"{OPENAI}::test_several_texts",),
    ),
)
