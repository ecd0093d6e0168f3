"""The section on certificates, from the file that spheret certify writes."""

import html
import json

from report_helpers import read_group, write_tables

from spheret.cli import main


def test_certificates(tmp_path):
    run = tmp_path / "run"
    tiny = ["--layers", "1", "--heads", "2", "--width", "16", "--block", "16", "--steps", "2", "--eval-windows", "4"]
    arguments = ["--scheme", "proj-spheretnorm", "--data", "sotu", *tiny, "--out", str(run), "--quiet"]
    assert main(["train", *arguments]) == 0
    # two steps teach it nothing
    assert main(["certify", str(run)]) == 1
    write_tables([run], tmp_path / "report")
    assert (run / "certificate.json").exists()
    assert len(read_group([run]).results) == 1
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Certificate of run, step 2" in page
    assert "The other numbers of this run" not in page
    assert "From run/certificate.json" in page
    # what the model achieves comes first
    assert "run, step 2: The model predicts no better than token frequencies: its loss is" in page
    assert "run, step 2: The paper&#39;s bound holds at" in page or "run, step 2: The paper's bound holds at" in page

    # a certificate of an earlier checkpoint is labelled as such
    certificate = json.loads((run / "certificate.json").read_text())
    (run / "certificate.json").write_text(json.dumps(certificate | {"checkpoint": 1}))
    write_tables([run], tmp_path / "report")
    page = html.unescape((tmp_path / "report" / "report.html").read_text())
    assert "Certificate of run, step 1" in page
    assert "The certificate is of step 1. The other numbers of this run are of step 2." in page
