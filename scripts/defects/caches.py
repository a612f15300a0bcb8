"""Defects of what is removed from caches."""

from __future__ import annotations

from defects.defect import Defect

MODELS, CACHED = "tests/cli/test_models_cli.py", "loader/cached.py"

CACHES = (
    Defect(
        "caches: a link out of the cache is a model",
        CACHED,
        "return folder.is_dir() and not folder.is_symlink()",
        "return folder.is_dir()",
        (MODELS,),
    ),
    Defect(
        "caches: a file that a link leads to is a model of the cache",
        CACHED,
        "if path.resolve().is_relative_to(inside) and path.is_file()",
        "if path.is_file()",
        (MODELS,),
    ),
    Defect(
        "caches: what stayed counts as removed",
        CACHED,
        "if os.path.lexists(repo.repo_path):",
        "if False:",
        (MODELS,),
    ),
)
