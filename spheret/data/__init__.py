"""Data: from any text to checked, resumable shards, and from shards to windows."""

from typing import TYPE_CHECKING

from spheret.support.errors import need_lab
from spheret.support.lazy import lazy

need_lab()

# imported when first used, so that `spheret prepare` starts without torch
_HOMES = {
    "CORPORA": "spheret.data.corpora",
    "Data": "spheret.data.store",
    "Loader": "spheret.data.loader",
    "Tokenizer": "spheret.data.tokenizers",
    "Validation": "spheret.data.loader",
    "cached": "spheret.data.named",
    "open_data": "spheret.data.store",
    "open_named": "spheret.data.named",
    "prepare": "spheret.data.preparation",
    "refuse_output_among_text": "spheret.data.named",
    "verify": "spheret.data.shards",
}
__all__ = [*_HOMES]
__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from spheret.data.corpora import CORPORA as CORPORA
    from spheret.data.loader import Loader as Loader
    from spheret.data.loader import Validation as Validation
    from spheret.data.named import cached as cached
    from spheret.data.named import open_named as open_named
    from spheret.data.named import refuse_output_among_text as refuse_output_among_text
    from spheret.data.preparation import prepare as prepare
    from spheret.data.shards import verify as verify
    from spheret.data.store import Data as Data
    from spheret.data.store import open_data as open_data
    from spheret.data.tokenizers import Tokenizer as Tokenizer
