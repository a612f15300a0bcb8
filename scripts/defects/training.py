"""Defects of training: of what is learnt, of resume, and of where it runs."""

from __future__ import annotations

from defects.defect import Defect

RESUME = "tests/train/test_resume.py"
FORWARD = "tests/train/test_forward.py"
DEVICES = "tests/train/test_devices.py"
TEXT = "tests/train/test_text.py"
EAGLE = "tests/train/test_eagle.py"
FORMS = "tests/spec/eagle/test_checkpoint.py"

TRAINING = [
    Defect(
        "training starts anew although there is a checkpoint",
        "train/loop.py",
        "if self.checkpoint.exists():",
        "if False:",
        (f"{RESUME}::test_no_step_is_done_twice",),
    ),
    Defect(
        "every process takes the first one's items",
        "train/loop.py",
        "range(start + rank() * options.batch, start + (rank() + 1) * options.batch)",
        "range(start, start + options.batch)",
        (DEVICES,),
    ),
    Defect(
        "every process takes the first GPU",
        "train/work.py",
        'return f"cuda:{local}"',
        'return "cuda:0"',
        (DEVICES,),
    ),
    Defect(
        "whole texts of training ignore sliding windows",
        "train/selftext.py",
        "(behind >= 0) & (behind < window)",
        "behind >= 0",
        (FORWARD,),
    ),
    Defect(
        "new tokens of training ignore sliding windows",
        "train/selftext.py",
        "key, value = key[:, :, length - window :], value[:, :, length - window :]",
        "pass",
        (FORWARD,),
    ),
    Defect(
        "the teacher's penalty sees one token too many",
        "train/loss.py",
        "width = min(window, first + rows)",
        "width = min(window + 1, first + rows)",
        (FORWARD,),
    ),
    Defect(
        "the penalty's gradient counts repeated tokens several times",
        "train/loss.py",
        "return logits * torch.ones_like(logits).scatter_(1, ids, factors)",
        "return logits.scatter(1, ids, logits.gather(1, ids) * factors)",
        (FORWARD,),
    ),
    Defect(
        "blocks of training text lack the first token",
        "train/data.py",
        "                yield [*prefix, *piece]",
        "                yield piece",
        (TEXT,),
    ),
    Defect(
        "the context of a long prompt's penalty is not kept",
        "train/collect.py",
        "cut = max(0, length - shortest - sampling.window)",
        "cut = max(0, length - shortest)",
        (RESUME,),
    ),
    Defect(
        "deeper drafts of training see positions after their own",
        "train/eagle_student.py",
        "seen = behind >= 0",
        "seen = behind >= -1",
        (EAGLE,),
    ),
    Defect(
        "the window of training is one too wide at each depth",
        "train/eagle_student.py",
        "seen &= behind + depth < window",
        "seen &= behind < window",
        (EAGLE,),
    ),
    Defect(
        "a drafter learns with the embedding of the token before",
        "train/eagle_student.py",
        "tokens[:, 1 + i : 1 + i + m]",
        "tokens[:, i : i + m]",
        (EAGLE,),
    ),
    Defect(
        "a drafter's start has the constant in query heads of other groups",
        "train/eagle_start.py",
        "head * d * (config.heads // config.kv_heads)",
        "head * d",
        (EAGLE,),
    ),
    Defect(
        "features are those of the next layer",
        "train/features.py",
        "backbone.body.layers[number].register_forward_pre_hook",
        "backbone.body.layers[(number + 1) % len(backbone.body.layers)].register_forward_pre_hook",
        (EAGLE,),
    ),
    Defect(
        "layers that a drafter names by their outputs are taken for inputs",
        "spec/eagle/said.py",
        "one + 1 if numbers[0] == 1 else one",
        "one",
        (FORMS,),
    ),
    Defect(
        "a drafter's ids are always taken for offsets",
        "spec/eagle/checkpoint.py",
        "return [said, offsets] if absolute and rising else [offsets, said]",
        "return [offsets]",
        (FORMS,),
    ),
    Defect(
        "queries of a GGUF drafter keep the order of the file",
        "spec/eagle/files.py",
        "return read.take(rows) if isinstance(read, Stored) else read[rows]",
        "return read",
        (FORMS,),
    ),
]
