"""Fields of OpenAI's interface beside those that mean something here (`schemas`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenswift.checks import meant, shown
from tokenswift.serve.errors import Refused
from tokenswift.types import InputError

#: fields that would change the answer but do nothing here → their values that ask for nothing
WITHOUT: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "conversation": (None,),
    "prompt": (None,),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    "truncation": (None, "disabled", "auto"),
    "moderation": (None,),
    "context_management": (None, []),
    # vLLM's
    "add_generation_prompt": (None, True),
    "allowed_token_ids": (None,),
    "cache_salt": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "include_reasoning": (None, True),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "priority": (None, 0),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "skip_special_tokens": (None, False),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
#: fields that no text depends on, and hints
NO_MATTER = ("max_tool_calls", "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention")
NO_MATTER += ("reasoning", "reasoning_effort", "safety_identifier", "service_tier", "store", "stream_options")
NO_MATTER += ("user", "verbosity", "prompt_cache_options", "background_options", "access_programs", "image")
NO_MATTER += ("guided_decoding_backend", "request_id")  # vLLM's
#: what `include` of a response may name; but for the first there is nothing of it here
INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results")
INCLUDED += ("web_search_call.results", "web_search_call.action.sources", "message.input_image.image_url")
INCLUDED += ("computer_call_output.output.image_url", "code_interpreter_call.outputs")


def check_others(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Look at the fields of a body that mean nothing here.

    Args:
        given: their values.
        known: names of those that do.
    Raises:
        InputError: what is asked for is not to be had.
        Refused: nobody knows such a field, as OpenAI's server says.
    """
    for name, value in given.items():
        if name in WITHOUT:
            if value not in WITHOUT[name]:
                usual = next((v for v in WITHOUT[name] if v is not None), None)
                raise InputError(f"{name} is {shown(value)}; valid here: {json.dumps(usual)}", name)
        elif name not in NO_MATTER:
            quoted = shown(name)[1:-1]
            more = meant(name, known)
            raise Refused(400, f"{quoted} is no field of this request{more}", quoted, "unknown_parameter")
