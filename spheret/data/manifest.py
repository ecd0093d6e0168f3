"""What manifest.json and progress.json of a data directory hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from spheret.support.documents import Count, Document, Fraction, Positive, Record, Sha256, Text

FORMAT, VERSION = "spheret-data", 1
# the tokenizer, unless its name is enough to build it again
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "val")
# the bytes of a shard that have a hash of their own
MIB = 1 << 20
# a manifest has 64 characters per MiB of its shards: this is enough for 16 TB
MOST_OF_MANIFEST = 1 << 30

ShardName = Annotated[str, Meta(pattern=r"^(train|val)-\d{5}\.bin$")]
Hexadecimal = Annotated[str, Meta(pattern="^[0-9a-f]{1,64}$")]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
# unset if the hash of a document decides its split
ByPosition = Literal["position"] | UnsetType


class TokenizerRecord(Record):
    """A tokenizer, described so that the same one can be built again."""

    name: Text
    sha256: Sha256
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 32)]
    end_of_text: TokenId
    file: str | None

    def __post_init__(self) -> None:
        if self.end_of_text >= self.vocab_size:
            raise ValueError(f"end_of_text must lie below vocab_size {self.vocab_size}, got {self.end_of_text}")
        if self.file not in (None, TOKENIZER):
            raise ValueError(f"file must be {TOKENIZER} or null, got {self.file[:80]!r}")


class CorpusRecord(Record):
    """Which text."""

    name: str
    revision: str
    licence: str
    documents_sha256: Sha256


class ShardRecord(Record):
    """One file of ids.

    sha256_per_mib: the SHA-256 of each MiB of the file and of what remains, one after the other.
    """

    name: ShardName
    tokens: Positive
    sha256: Sha256
    largest_id: TokenId
    sha256_per_mib: Annotated[str, Meta(pattern="^([0-9a-f]{64})+$")]


def _check_splits(**values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value.keys() != set(SPLITS):
            raise ValueError(f"{name} must have the keys train and val, got {', '.join(sorted(value))[:80]}")


def shard_name(split: str, index: int) -> str:
    """The file name of a shard."""
    return f"{split}-{index:05d}.bin"


class Manifest(Record):
    """manifest.json, which completes a data directory. The dictionaries have one entry per split.

    split: set if the documents were too few, so that the end of each is for validation.
    """

    corpus: CorpusRecord
    tokenizer: TokenizerRecord
    dtype: Literal["uint16", "uint32"]
    val_fraction: Fraction
    shard_tokens: Positive
    documents: dict[str, Count]
    tokens: dict[str, Count]
    empty_documents: Count
    repaired_documents: Count
    replaced_characters: Count
    largest_id: TokenId
    counts_sha256: Sha256
    shards: dict[str, list[ShardRecord]]
    split: ByPosition = UNSET
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        """Raise unless the fields agree with each other."""
        _check_splits(documents=self.documents, tokens=self.tokens, shards=self.shards)
        vocab_size = self.tokenizer.vocab_size
        if self.dtype != dtype_name(vocab_size):
            raise ValueError(f"dtype {self.dtype!r} does not fit {vocab_size} ids")
        for split, records in self.shards.items():
            if [shard.name for shard in records] != [shard_name(split, number) for number in range(len(records))]:
                raise ValueError(f"the names of the shards of {split} are not in order")
            if sum(shard.tokens for shard in records) != self.tokens[split]:
                raise ValueError(f"the shards of {split} do not add up to its tokens")
            for shard in records:
                check_ids(shard.name, shard.largest_id, vocab_size)
                hashes = -(-shard.tokens * (2 if self.dtype == "uint16" else 4) // MIB)
                if len(shard.sha256_per_mib) != 64 * hashes:
                    raise ValueError(f"sha256_per_mib of {shard.name} must hold {hashes} hashes")

    def summary(self) -> str:
        """How the text is split, in one line."""
        by_position = self.split == "position"
        unit = "parts" if by_position else "documents"
        text = ", ".join(
            f"{split} {self.tokens[split]:,} tokens in {self.documents[split]:,} {unit}" for split in SPLITS
        )
        if by_position:
            text += f" (too few documents to set some aside, so val is the last {self.val_fraction:.3g} of each)"
        repaired = self.repaired_documents
        return text + (f"; {repaired:,} documents held invalid UTF-8, which was replaced" if repaired else "")


class SettingsRecord(Record):
    """What decides the output of a preparation.

    tokenizer_sha256: null unless the tokenizer is a file.
    split: as in the manifest.
    """

    corpus: str
    revision: str
    tokenizer: Text
    val_fraction: Fraction
    shard_tokens: Positive
    files: str
    tokenizer_sha256: Sha256 | None
    split: ByPosition = UNSET


class HubCursor(Record):
    """A place in a streamed dataset; `state` is what `datasets` returned."""

    documents: Count
    state: dict[str, Any]


# a file and the documents to skip in it, or a place in a streamed dataset
Cursor = tuple[Count, Count] | HubCursor


class ResumePoint(Record):
    """Where a preparation resumes, after the last whole shard: everything before it is on the disk."""

    tokenizer: TokenizerRecord
    counts: dict[Literal["train", "val", "empty", "repaired", "replaced_characters"], Count]
    digest: Hexadecimal
    cursor: Cursor
    # the ids that each split has so far
    tokens: dict[str, Count]

    def __post_init__(self) -> None:
        _check_splits(tokens=self.tokens)


class Progress(Record):
    """progress.json, the last note of an unfinished preparation. Before the first shard it has no position."""

    settings: SettingsRecord
    position: ResumePoint | None
    format: str = FORMAT
    version: int = VERSION


def dtype_name(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smaller of uint16 and uint32 that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def check_ids(where: object, largest: int, vocab_size: int) -> None:
    """Raise if the largest id lies beyond the vocabulary, so that an embedding has no row for it."""
    if largest >= vocab_size:
        raise ValueError(
            f"{where} holds token id {largest}, beyond the vocabulary of {vocab_size} (largest {vocab_size - 1}): "
            f"the data is damaged or of a different tokenizer, prepare it again."
        )


MANIFESTS = Document(Manifest, "prepare", "prepare the directory again", MOST_OF_MANIFEST)
PROGRESSES = Document(Progress, "prepare", "delete the directory and start again")
