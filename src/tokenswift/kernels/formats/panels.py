"""Panels of 32 rows of a quantized weight, as the CPU kernels read them (see `kernels/cpu/cpu_low.h`)."""

from __future__ import annotations

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor

from tokenswift.kernels.formats.format import Format, Numbers, Stored

PANEL = 32  # rows of a weight side by side; NR of cpu_tile.h


def panel_bytes(form: Format, columns: int) -> int:
    """Bytes of a panel of rows of K weights, K a multiple of the block."""
    groups, each = form.block // form.group, 1 if form.offset else 2  # scales alone, or with least values
    heads = each * (2 + (groups if groups > 1 else 0)) * PANEL
    return columns // form.block * (heads + form.block * form.bits * PANEL // 8)


def fill_panels(stored: Stored, panels: UInt8[Tensor, "P Q"]) -> None:
    """The panels of a weight, one below the other: the numbers of its blocks in the order of a product. What
    `ts_pack` of the CPU kernels does."""
    form, numbers = stored.format, stored.format.split(stored.blocks)
    missing = -len(stored) % PANEL

    def columns(values: Tensor, per: int) -> Tensor:
        """(N, n) → (P, blocks, per, 32): what stands side by side in a panel."""
        padded = torch.nn.functional.pad(values, (0, 0, 0, missing)) if missing else values
        return padded.unflatten(0, (-1, PANEL)).unflatten(2, (-1, per)).permute(0, 2, 3, 1)

    groups = form.block // form.group
    heads = [columns(numbers.scale, 1), *([] if numbers.least is None else [columns(numbers.least, 1)])]
    if numbers.fine is not None:
        heads.append(columns(numbers.fine, groups))
    if numbers.fine_least is not None:
        heads.append(columns(numbers.fine_least, groups))
    parts = [head.contiguous().view(torch.uint8).flatten(2) for head in heads]
    words = _words(form.bits, numbers.u)
    words = columns(words, words.shape[1] * form.block // numbers.u.shape[1])
    parts.append(words.contiguous().view(torch.uint8).flatten(2))
    panels.copy_(torch.cat(parts, 2).flatten(1))


def _words(bits: int, u: UInt8[Tensor, "N K"]) -> Int32[Tensor, "N W"]:
    """The words of each 32 numbers, four numbers in a word of 8 bits. Those of fewer bits: first four words
    with two times four low halves each, then what is above them."""
    quads = u.contiguous().view(torch.int32)  # four positions: the low or the high halves of a word's bytes
    if bits == 8:
        return quads
    quads = quads.unflatten(1, (-1, 8))
    low = (quads & 0x0F0F0F0F).unflatten(2, (4, 2))
    made = [low[..., 0] | low[..., 1] << 4]
    if bits == 5:
        made.append(_joined(quads >> 4 & 0x01010101, 1))
    if bits == 6:
        made.append(_joined((quads >> 4 & 0x03030303).unflatten(2, (2, 4)), 2))
    return torch.cat(made, 2).flatten(1)


def _joined(fields: Tensor, bits: int) -> Tensor:
    """One word from n, of whose bytes each holds so many bits: (N, G, …, n) → (N, G, words)."""
    shift = bits * torch.arange(fields.shape[-1], dtype=torch.int32)
    return (fields << shift).sum(-1, dtype=torch.int32).unflatten(1, (fields.shape[1], -1)).flatten(2)


def numbers_of(form: Format, panels: UInt8[Tensor, "P Q"], rows: int) -> Numbers:
    """The numbers that panels hold: what `fill_panels` was given."""
    groups, count = form.block // form.group, form.block // 32
    fine, high = groups * PANEL, {4: 0, 5: 128, 6: 256, 8: 0}[form.bits]
    with_least = form.offset == 0
    sizes = [2 * PANEL, *([2 * PANEL] if with_least else [])]
    if groups > 1:
        sizes += [fine, *([fine] if with_least else [])]
    words = 1024 if form.bits == 8 else 512
    block = sum(sizes) + count * (words + high)
    whole = panels.unflatten(1, (-1, block))
    parts = list(whole.split([*sizes, count * (words + high)], 2))

    def rows_of(values: Tensor) -> Tensor:
        """(P, blocks, n, 32) → (N, blocks · n)."""
        return values.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)[:rows].contiguous()

    def half(part: Tensor) -> Tensor:
        return rows_of(part.contiguous().view(torch.float16)[:, :, None])

    found = {"scale": half(parts[0]), "least": half(parts[1]) if with_least else None}
    if groups > 1:
        at = 2 if with_least else 1
        kind = torch.int8 if form.offset else torch.uint8
        found["fine"] = rows_of(parts[at].contiguous().view(kind).unflatten(2, (groups, PANEL)))
        if with_least:
            found["fine_least"] = rows_of(parts[at + 1].unflatten(2, (groups, PANEL)))
    numbers = parts[-1].unflatten(2, (count, -1))
    low = numbers[..., :words].unflatten(3, (-1, PANEL, 4)).transpose(4, 5)  # (…, words, 4, 32)
    if form.bits == 8:
        return Numbers(rows_of(low.flatten(2, 4)), **found)
    quads = torch.stack((low & 15, low >> 4), 4).flatten(3, 4)  # (…, 8, 4, 32)
    if form.bits == 5:
        bits = numbers[..., words:].unflatten(3, (1, PANEL, 4)).transpose(4, 5)
        quads = quads | (bits >> torch.arange(8, dtype=torch.uint8)[:, None, None] & 1) << 4
    if form.bits == 6:
        bits = numbers[..., words:].unflatten(3, (2, 1, PANEL, 4)).transpose(5, 6)
        shift = 2 * torch.arange(4, dtype=torch.uint8)[:, None, None]
        quads = quads | (bits >> shift & 3).flatten(3, 4) << 4
    return Numbers(rows_of(quads.flatten(2, 4)), **found)
