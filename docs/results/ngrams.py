"""Write the losses of n-gram models beside the rows of every study: NAME.ngrams.json. It takes a minute.

    python docs/results/ngrams.py

The models are fitted on the tokens that the runs of a group saw, and read the same validation windows.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from build import HERE, STUDIES, rows_of

from spheret.lab.laboratory import Laboratory, Place
from spheret.lab.ngrams import NGRAMS, NgramsRecord, ngrams_beside, ngrams_file
from spheret.lab.plan import read_plan
from spheret.lab.rows import Key
from spheret.runs.run import manifest_sha256

for study, plan in STUDIES.items():
    begun = {key.group for key in rows_of(study)}
    found = []
    with TemporaryDirectory() as directory:
        laboratory = Laboratory(read_plan(plan), Path(directory), Place(quiet=True))
        for group in laboratory.plan.groups:
            if group.name in begun:
                label, data = group.contestants[0].label, laboratory.data(group)
                key = Key(group.name, label, group.rates(label)[0], group.part.tuned_with[0])
                found.append(ngrams_beside(group.name, laboratory.name(key)[1], data, manifest_sha256(data)))
    if found:
        records = NgramsRecord([record for record in found if record is not None])
        NGRAMS.write(ngrams_file(HERE / f"{study}.jsonl"), records)
