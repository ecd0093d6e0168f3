"""Write the losses of n-gram models beside the rows of every study: NAME.ngrams.json, if some are missing.

    python docs/results/ngrams.py        # make results runs it

The models are fitted on the tokens that the runs of a group saw, and read the same validation windows.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from build import HERE, STUDIES, rows_of

from spheret.lab.laboratory import Laboratory, Place
from spheret.lab.ngrams import read_ngrams
from spheret.lab.plan import read_plan

for study, plan in STUDIES.items():
    begun, results = {key.group for key in rows_of(study)}, HERE / f"{study}.jsonl"
    # what is known follows from the rows' settings, and opening the data of a study takes long
    if begun <= {each.group for each in read_ngrams(results)}:
        continue
    with TemporaryDirectory() as directory:
        laboratory = Laboratory(read_plan(plan), Path(directory), Place(quiet=True))
        laboratory.write_ngrams(results, [group for group in laboratory.plan.groups if group.name in begun])
