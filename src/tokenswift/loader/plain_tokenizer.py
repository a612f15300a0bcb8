"""A tokenizer without transformers: texts, ids and the chat template, from ``tokenizer.json`` as it stands.

transformers' tokenizer of most checkpoints is that file and nothing else. :func:`read` makes it where that
is sure: for classes that load the file, and files that say nothing beyond it (names in `KNOWN`). Qwen's
class builds its tokenizer anew of the file's tokens and merges, which is done here, too. Everything else is
left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenswift.files import read_small
from tokenswift.json_files import MOST_CONFIG, MOST_TOKENIZER
from tokenswift.types import InputError

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
#: files and folders that say more
MORE = ("tekken.json", "additional_chat_templates")
#: special tokens with names, as transformers has them
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: fields of a tokenizer's config that are looked at, and those that change no ids, texts or templates
READ = ("added_tokens_decoder", "additional_special_tokens", "chat_template", "extra_special_tokens")
READ += ("add_prefix_space", "split_special_tokens", "tokenizer_class", *NAMED)
KNOWN = ("add_bos_token", "add_eos_token", "backend", "clean_up_tokenization_spaces", "errors", "is_local")
KNOWN += ("local_files_only", "model_input_names", "model_max_length", "name_or_path", "padding_side")
KNOWN += ("return_token_type_ids", "spaces_between_special_tokens", "truncation_side")
#: classes that load the file, and the families where they do; the one that builds anew
LOADED = ("TokenizersBackend", "PreTrainedTokenizerFast")
LOADING = ("llama", "mistral", "qwen3")
QWEN, REBUILT = ("Qwen2Tokenizer", "Qwen2TokenizerFast"), ("qwen2", "qwen3")
END = "<|endoftext|>"  # which Qwen's class takes for names that a file leaves out
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


class PlainTokenizer:
    """What `loader.prompts` and the engine ask of a tokenizer; names as of transformers' own.

    Args:
        made: the tokenizer as its library has it, a ``tokenizers.Tokenizer``.
        special: special tokens by name (``bos_token``, …).
        template: the chat template, or None.
    """

    def __init__(self, made: Any, special: Mapping[str, str], template: str | None) -> None:
        self.backend_tokenizer = made
        self.special_tokens_map, self.chat_template = dict(special), template
        self.bos_token = special.get("bos_token")
        self.bos_token_id, self.eos_token_id = (self._id(special.get(f"{name}_token")) for name in _ENDS)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The ids of a text, under "input_ids"."""
        made = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": made.ids}

    def decode(
        self, tokens: list[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of some ids."""
        if clean_up_tokenization_spaces:
            raise ValueError("clean_up_tokenization_spaces is True; valid: False")
        return self.backend_tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """The name of an id in the vocabulary."""
        return self.backend_tokenizer.id_to_token(token)

    def get_vocab(self) -> dict[str, int]:
        """Tokens and their ids."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)


_ENDS = ("bos", "eos")


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of the library `tokenizers`, which is no Exception."""
    return type(error).__module__ == "pyo3_runtime"


def read(folder: Path, family: str) -> PlainTokenizer | None:
    """The tokenizer of a model folder whose files were checked (`folder_checks.check_tokenizer_files`).

    Args:
        family: the model type of its config.json.
    Returns:
        None where transformers' tokenizer may be another one.
    """
    from tokenizers import Tokenizer

    if any((folder / name).exists() for name in MORE) or not (folder / FILE).is_file():
        return None
    try:
        said = json.loads(read_small(folder / CONFIG, MOST_CONFIG))
        text = read_small(folder / FILE, MOST_TOKENIZER).decode()
        whole = json.loads(text)
        template = said.get("chat_template")
        if (folder / TEMPLATE).exists():
            template = read_small(folder / TEMPLATE, MOST_TOKENIZER).decode()
        special = _special(folder, said, whole)
        if special is None or not (template is None or isinstance(template, str)):
            return None
        if said["tokenizer_class"] in LOADED and family in LOADING:
            made = Tokenizer.from_str(text)
        elif said["tokenizer_class"] in QWEN and family in REBUILT:
            special = dict.fromkeys(("unk_token", "eos_token", "pad_token"), END) | special
            made = _rebuilt(whole, Tokenizer.from_str(text))
        else:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # transformers says what is wrong
    except BaseException as error:  # tokenizers raises plain Exceptions, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise InputError(f"tokenizer {folder / FILE} cannot be read ({error})") from error
    if made is None or made.truncation is not None or made.padding is not None:
        return None
    if made.post_processor is None:
        from tokenizers import processors

        made.post_processor = processors.TemplateProcessing(
            single="$A:0", pair="$A:0 $B:1", special_tokens=[]
        )
    named = {name: token for name, token in special.items() if token is not None}
    there = {token["content"] for token in whole["added_tokens"]}
    return PlainTokenizer(made, named, template) if there.issuperset(named.values()) else None


def _special(folder: Path, said: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, str | None] | None:
    """Special tokens by name, of a config and the tokenizer's own file; None where the two say different
    things, or the config more than is known here."""
    if not said.keys() <= {*READ, *KNOWN} or said.get("split_special_tokens") or said.get("add_prefix_space"):
        return None
    added = {token["id"]: {k: v for k, v in token.items() if k != "id"} for token in whole["added_tokens"]}
    named: dict[str, Any] = {name: said[name] for name in NAMED if name in said}
    if "added_tokens_decoder" in said:
        if {int(at): dict(token) for at, token in said["added_tokens_decoder"].items()} != added:
            return None
    elif (folder / "added_tokens.json").exists():
        return None
    elif (more := folder / "special_tokens_map.json").exists():
        found = json.loads(read_small(more, MOST_CONFIG))
        if not found.keys() <= set(NAMED):
            return None
        named |= found
    special = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items()}
    extra = said.get("additional_special_tokens") or said.get("extra_special_tokens") or []
    plain = {token["content"] for token in added.values() if {**token, **_PLAIN} == token}
    texts = [*(token for token in special.values() if token is not None), *extra]
    if not isinstance(extra, list) or not all(isinstance(token, str) and token in plain for token in texts):
        return None
    return special


def _rebuilt(whole: Mapping[str, Any], read: Any) -> Any:
    """The tokenizer that Qwen's class makes of a file's tokens and merges; None: of another model, none."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    model = whole["model"]
    if model.get("type") != "BPE" or not isinstance(model["vocab"], dict):
        return None
    merges: list[Any] = [tuple(p.split(" ") if isinstance(p, str) else p) for p in model["merges"]]
    made = Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
            byte_fallback=False,
        )
    )
    made.decoder, made.normalizer = decoders.ByteLevel(), normalizers.NFC()
    split = pre_tokenizers.Split(Regex(CUT), behavior="isolated", invert=False)
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    if read.post_processor is not None:
        made.post_processor = read.post_processor
    added = sorted(whole["added_tokens"], key=lambda token: token["id"])
    made.add_tokens([AddedToken(**{k: v for k, v in token.items() if k != "id"}) for token in added])
    return made if read.truncation is None and read.padding is None else None
