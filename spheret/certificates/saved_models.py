"""Certificates of models that transformers has saved."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import torch

from spheret.analysis.inputs import loss_windows, validation_windows
from spheret.analysis.saved_models import block_of, on_device, open_saved
from spheret.certificates import certificate
from spheret.certificates.certificate_json import CertificateRecord
from spheret.certificates.measure import DENSE
from spheret.support.errors import shortened
from spheret.support.machine import machine
from spheret.support.meter import Meter
from spheret.support.threads import few_threads

if TYPE_CHECKING:
    from spheret.hub.open import SavedModel

# Jacobians are taken in shorter windows than losses: the model runs on the whole window for every direction
_JACOBIAN_BLOCK = 64
# how many logits one forward pass of a certificate may hold
_LOGITS = 1 << 27
# what torch says of operations without a forward derivative or without a rule for many directions at once
_NOT_FORWARD = ("functorch", "forward AD", "vmap")


def certify_saved(
    saved: SavedModel,
    tokens: int = 64,
    sequence: int = 8,
    data: str | None = None,
    device: str = "cpu",
    quiet: bool = True,
) -> CertificateRecord:
    """The certificate of a saved model, with the data, seconds and machine that it comes from. Nothing is proven."""
    begun = time.perf_counter()
    decoder, source = open_saved(saved, data, torch.float64, device, quiet)
    if decoder.position not in (None, 0.0, 1.0):
        raise ValueError(
            f"{saved.path} was saved in the middle of its annealing, at t = {decoder.position:g}, where the lengths "
            "of the states go beside the stream: anneal it to 1, or revert it. spheret inspect takes it as it is."
        )
    block = block_of(decoder)
    ids, targets = validation_windows(source, min(block, _JACOBIAN_BLOCK), tokens)
    ids, _ = on_device(saved, decoder, ids, targets)
    most = max(block, _LOGITS // source.vocab_size)
    text = on_device(saved, decoder, *loss_windows(source, block, most))
    with few_threads(decoder.width), Meter("certify", quiet) as meter:
        tick = meter.counter(tokens, "tokens", parts=len(decoder.kinds))
        try:
            document = certificate.certify(
                decoder, ids, tokens, sequence, exact=decoder.width <= DENSE, tick=tick, text=text,
                unigram_entropy=source.unigram_entropy(),
            )  # fmt: skip
        except RuntimeError as error:
            if not any(word in str(error) for word in _NOT_FORWARD):
                raise
            raise ValueError(
                f"{type(decoder.model).__name__} holds an operation of which torch has no forward derivative "
                f"({shortened(str(error), 120)}), so it cannot be certified: spheret inspect takes it."
            ) from None
    return msgspec.structs.replace(
        document,
        run=saved.name,
        model=type(decoder.model).__name__,
        data=str(source.path),
        seconds=time.perf_counter() - begun,
        machine=machine(),
    )
