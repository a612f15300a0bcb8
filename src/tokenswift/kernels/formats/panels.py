"""Panels of 32 rows of a quantized weight, as the CPU kernels read them (see `kernels/cpu/cpu_low.h`)."""

from __future__ import annotations

import torch
from jaxtyping import UInt8
from torch import Tensor

from tokenswift.kernels.formats.format import Format, Numbers, Stored

PANEL = 32  # rows of a weight side by side; NR of cpu_tile.h


def panel_bytes(form: Format, columns: int) -> int:
    """Bytes of a panel of rows of K weights, K a multiple of the block."""
    groups, each = form.block // form.group, 1 if form.offset else 2  # scales alone, or with least values
    heads = each * (2 + (groups if groups > 1 else 0)) * PANEL
    return columns // form.block * (heads + form.block * form.bits * PANEL // 8)


def panels_of(stored: Stored) -> UInt8[Tensor, "P Q"]:
    """The panels of a weight, one below the other: the numbers of its blocks in the order of a product."""
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
    count = form.block // 32
    u = columns(numbers.u, form.block).unflatten(2, (count, 32))  # (P, blocks, count, 32 positions, 32)
    parts.append(torch.cat([piece.flatten(3) for piece in _pieces(form.bits, u)], 3).flatten(2))
    return torch.cat(parts, 2).flatten(1)


def _pieces(bits: int, u: Tensor) -> list[Tensor]:
    """The words of 32 positions, each (P, blocks, count, words, 32 columns, 4 bytes)."""
    if bits == 8:
        return [u.unflatten(3, (8, 4)).transpose(4, 5)]
    quads = u.unflatten(3, (8, 4))  # four positions: the low or the high halves of a word's bytes
    low = (quads & 15).unflatten(3, (4, 2))
    made = [(low[..., 0, :, :] | low[..., 1, :, :] << 4).transpose(4, 5)]
    if bits == 5:
        shift = torch.arange(8, dtype=torch.uint8)[:, None, None]
        made.append(((quads >> 4) << shift).sum(3, dtype=torch.uint8)[:, :, :, None].transpose(4, 5))
    if bits == 6:
        shift = 2 * torch.arange(4, dtype=torch.uint8)[:, None, None]
        high = (quads >> 4).unflatten(3, (2, 4))
        made.append((high << shift).sum(4, dtype=torch.uint8).transpose(4, 5))
    return made


def numbers_of(form: Format, panels: UInt8[Tensor, "P Q"], rows: int) -> Numbers:
    """The numbers that panels hold: what `panels_of` was given."""
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
