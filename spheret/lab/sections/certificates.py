"""The section on certificates: the certificate.json of each certified run."""

from __future__ import annotations

from spheret.certificates import certificate
from spheret.lab.page.tables import Table, TableCell
from spheret.lab.runs import RunGroup
from spheret.lab.sections.section import Section
from spheret.runs.layout import CERTIFICATE
from spheret.support.documents import known


def certificates_section(group: RunGroup) -> Section | None:
    """What every certified run achieves, and what is proven of it, sublayer by sublayer."""
    paragraphs: list[str] = []
    tables: list[Table] = []
    for result in group.results:
        document = certificate.read_certificate(result.run.path)
        if document is None:
            continue
        step = known(document.checkpoint)
        name = result.name if step is None else f"{result.name}, step {step}"
        paragraphs += [f"{name}: {text}" for text in [*certificate.summary(document), *certificate.verify(document)]]
        source = f"{result.name}/{CERTIFICATE} own_path.sublayers"
        texts = certificate.table(document.own_path)
        rows = [[TableCell(row[0]), *(TableCell(text, source=source) for text in row[1:])] for row in texts]
        notes = [f"From {result.name}/{CERTIFICATE}: {document.scope}."]
        if step is not None and step != result.step:
            notes.append(
                f"The certificate is of step {step}. The other numbers of this run are of step {result.step}."
            )
        tables.append(
            Table(f"certificate-{len(tables) + 1}", f"Certificate of {name}", list(certificate.COLUMNS), rows, notes)
        )
    return Section("certificates", "Certificates", paragraphs, tables, folded=True) if tables else None
