"""Watched trainings that nobody trained: headers and observations from a seed."""

import math
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np

from spheret.observe.records import (
    Event,
    Header,
    Observation,
    PlaceObservation,
    SublayerName,
    SublayerObservation,
)


def header(sublayers=4, model="Llama", **given):
    names = [
        SublayerName(
            k + 1, f"layers.{k // 2}.{('attention', 'mlp')[k % 2]}", f"layers.{k // 2}.{('o', 'down')[k % 2]}"
        )
        for k in range(sublayers)
    ]
    found = "residual sums" if sublayers else "parameters only"
    return Header(model, 123_456, 50, found, names, **given)


def observations(sublayers=4, steps=6, every=50, seed=0, events=None, places=3):
    """events: by the place of the observation."""
    random = np.random.default_rng(seed)
    found = []
    for k in range(steps):
        step = k * every
        drift = k / steps
        losses = [
            float(2 + 8 * math.exp(-(step - j) / (0.3 * steps * every)) + 0.05 * random.standard_normal())
            for j in range(min(every, step + 1))
        ]
        rows = [
            SublayerObservation(
                sublayer=n + 1,
                norm=float((1 + n) * (1 + drift)),
                growth=1.1,
                angle_mean=float(0.2 + 0.1 * random.random()),
                angle_max=float(0.5 + 0.1 * random.random()),
                moved=0.1,
                cosine=float(0.1 + 0.5 * drift * n / max(1, sublayers)),
                common_stream=float(0.1 * drift),
                common_output=float(0.2 * drift),
                massive=float(10 + 100 * drift * n),
                sink=float(random.random()) if n % 2 == 0 else None,
                grad_norm=float(0.1 * (1 + n) * math.exp(0.3 * random.standard_normal())),
                update=float(1e-3 * math.exp(0.3 * random.standard_normal())) if k else None,
            )
            for n in range(sublayers)
        ]
        outside = [PlaceObservation(f"weights.{n}", float(0.1 + random.random()), 1e-3) for n in range(places)]
        norm = float(math.exp(0.3 * random.standard_normal()))
        found.append(Observation(step, losses[::-1], norm, rows, outside, events=list((events or {}).get(k, []))))
    return found


def event(step, sublayer=3, **given):
    values = {"kind": "exploding", "where": f"layers.{sublayer}", "sentence": "its update is 30 times as large",
              "remedy": "lower its learning rate"}  # fmt: skip
    return Event(step=step, sublayer=sublayer, **{**values, **given})


def write_watch(path, own_header, seen, cut=b""):
    """Write a watch.jsonl. cut: the beginning of a line that a kill has cut short."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(asdict(each)) for each in (own_header, *seen)]
    Path(path).write_bytes(b"".join(line + b"\n" for line in lines) + cut)
    return Path(path)
