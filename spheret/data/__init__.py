"""Data: from any text to checked, resumable shards, and from shards to windows."""

from spheret.data.corpora import CORPORA, Corpus, resolve
from spheret.data.loader import Loader, Validation
from spheret.data.preparation import cached, prepare
from spheret.data.shards import verify
from spheret.data.store import Data, open_data
from spheret.data.tokenizers import TOKENIZERS, Tokenizer

__all__ = [
    "CORPORA",
    "TOKENIZERS",
    "Corpus",
    "Data",
    "Loader",
    "Tokenizer",
    "Validation",
    "cached",
    "open_data",
    "prepare",
    "resolve",
    "verify",
]
