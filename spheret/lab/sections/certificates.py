"""The section on certificates: the certificate.json of each certified run."""

from __future__ import annotations

from spheret.certificates import certificate
from spheret.lab.page.tables import Table, TableCell
from spheret.lab.runs import RunGroup
from spheret.lab.sections.section import Section
from spheret.runs.layout import CERTIFICATE


def certificates_section(group: RunGroup) -> Section | None:
    """What every certified run achieves, and what is proven of it, sublayer by sublayer."""
    paragraphs: list[str] = []
    tables: list[Table] = []
    for result in group.results:
        content = certificate.section(result.run.path)
        if content is None:
            continue
        step = content["checkpoint"]
        name = result.name if step is None else f"{result.name}, step {step}"
        paragraphs += [f"{name}: {text}" for text in [*content["summary"], *content["contradictions"]]]
        source = f"{result.name}/{CERTIFICATE} own_path.sublayers"
        rows = [[TableCell(row[0]), *(TableCell(text, source=source) for text in row[1:])] for row in content["rows"]]
        notes = [f"From {result.name}/{CERTIFICATE}: {content['scope']}."]
        if step is not None and step != result.step:
            notes.append(
                f"The certificate is of step {step}. The other numbers of this run are of step {result.step}."
            )
        tables.append(
            Table(f"certificate-{len(tables) + 1}", f"Certificate of {name}", content["columns"], rows, notes)
        )
    return Section("certificates", "Certificates", paragraphs, tables, folded=True) if tables else None
