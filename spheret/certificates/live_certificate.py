"""A certificate during training: `spheret train --certify-every N` calls this every N updates.

A call works in float64 and holds a float64 copy of the weights. For every token and every sublayer it computes
`width` directional derivatives in ball arithmetic and three decompositions of width x width matrices. Above width 512
it decomposes nothing: |B| and the singular values are Lanczos estimates, and every verdict is "measured only". The
result records the seconds that the call took.
"""

from __future__ import annotations

import time

import torch
from msgspec import UNSET, UnsetType
from torch import Tensor

from spheret.certificates.certificate import certify
from spheret.certificates.certificate_json import CertifiedSublayer
from spheret.model.gpt import GPT
from spheret.runs.metrics import LiveCertificate, LiveSublayer
from spheret.support.threads import few_threads


def live_certificate(model: GPT, ids: Tensor, tokens: int = 16) -> LiveCertificate:
    """Certify the first `tokens` tokens of a batch of ids (windows, time).

    It works on a copy, so the model's weights, gradients, modes and random states do not change.
    """
    begun = time.perf_counter()
    ids = ids[:, :tokens]
    try:
        with few_threads(model.config.width), torch.autocast(ids.device.type, enabled=False):
            certificate = certify(model, ids, min(tokens, ids.numel()), sequence=0, exact=False)
    except ValueError as error:
        # a failed certificate must not end the run
        return LiveCertificate(failed=str(error), seconds=time.perf_counter() - begun)
    part = certificate.own_path
    last = part.depth[-1]
    return LiveCertificate(
        tokens=certificate.tokens,
        verdicts={str(verdict): count for verdict, count in part.verdicts.items()},
        inactive=[row.sublayer for row in part.sublayers if row.inactive],
        sigma_max=last.sigma_max,
        sigma_min=last.sigma_min,
        condition=last.condition,
        sublayers=[_brief(row) for row in part.sublayers],
        S=_if_known(last.S_max),
        A=_if_known(last.A_max),
        product_m=_if_known(last.product_m_min),
        seconds=time.perf_counter() - begun,
    )


def _brief(row: CertifiedSublayer) -> LiveSublayer:
    return LiveSublayer(
        sublayer=row.sublayer,
        angle_max=row.angle_max,
        moved=row.moved,
        B_max=row.B_max,
        Delta_max=_if_known(row.Delta_max),
        m_min=_if_known(row.m_min),
        sigma_max=row.sigma_max,
        sigma_min=row.sigma_min,
        verdict=row.verdict,
    )


def _if_known(value: float | None) -> float | UnsetType:
    return UNSET if value is None else value
