"""The config of a run that repeats a run of the paper's tables, as its config.json has it."""

import hashlib

from spheret.paper.runs import PaperRun


def paper_config(recipe: PaperRun) -> dict:
    """What config.json of a run that follows the paper's recipe says about the run."""
    identity = recipe.data_settings()
    data = {
        "path": "data", "manifest_sha256": hashlib.sha256(recipe.dataset.encode()).hexdigest(),
        "val_fraction": identity["val_fraction"],
        "corpus": {
            "name": recipe.dataset, "revision": identity["revision"], "licence": "ODC-By-1.0",
            "documents_sha256": "c" * 64,
        },
        "tokenizer": {
            "name": identity["tokenizer"], "vocab_size": 50257, "end_of_text": 50256, "file": None,
            "sha256": "b" * 64,
        },
        "tokens": {"train": 9_000_000, "val": 45_000}, "unigram_entropy": 7.5,
    }  # fmt: skip
    return {**recipe.config(None).as_dict(), "data": data}
