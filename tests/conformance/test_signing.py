"""Signatures of reports, by the package that makes them."""

import json

import pytest
import report_cases
import typer
from linattn_conformance import commands, report, signing
from typer.testing import CliRunner

GOOD = report_cases.make(report_cases.passing())


def command(function, *words):
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def made(tmp_path):
    """A report, and keys of two vendors."""
    pytest.importorskip("securesystemslib", reason="signatures need securesystemslib[crypto]")
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as form

    (tmp_path / "report.json").write_text(report.text(GOOD), encoding="utf-8")
    for name in ("acme", "other"):
        private = ed25519.Ed25519PrivateKey.generate()
        secret = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        public = private.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pem").write_bytes(secret)
        (tmp_path / f"{name}.pub").write_bytes(public)
    done = command(
        commands.sign_report, tmp_path / "report.json", "--key", tmp_path / "acme.pem", "-o", tmp_path / "report.dsse.json"
    )
    assert done.exit_code == 0, done.output
    return tmp_path


def verified(folder, key="acme.pub", signature="report.dsse.json"):
    words = folder / "report.json", "--signature", folder / signature, "--key", folder / key
    done = command(commands.verify_report, *words)
    return done.exit_code, [line for line in done.stdout.splitlines() if line.startswith("fault")], done.output


def test_a_signature_is_of_this_report_and_this_key(made):
    assert verified(made)[:2] == (0, [])
    assert verified(made, "other.pub")[:2] == (3, ["fault    report.dsse.json is not signed by other.pub"])
    told = json.loads((made / "report.dsse.json").read_text())
    assert told["payloadType"] == signing.PAYLOAD


def test_a_signature_of_another_report_is_none_of_this(made):
    again = report_cases.make(report_cases.passing(), complaints=["the process died"])
    (made / "report.json").write_text(report.text(again), encoding="utf-8")
    status, faults, _ = verified(made)
    assert (status, faults) == (3, ["fault    report.dsse.json is a signature of something else than report.json"])


def test_what_is_no_key_or_no_envelope(made):
    assert "no public key in PEM that can be used" in " ".join(verified(made, "report.json")[2].replace("│", " ").split())
    (made / "bad.json").write_text("{}")
    assert "no DSSE envelope" in " ".join(verified(made, signature="bad.json")[2].replace("│", " ").split())


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.serialization", None)
    with pytest.raises(signing.SigningError, match=r"signatures need the package .*: pip install 'securesystemslib\[crypto\]'"):
        signing.sign(tmp_path / "report.json", GOOD["verdict"], tmp_path / "acme.pem")


def test_a_signature_needs_a_key(tmp_path):
    (tmp_path / "report.json").write_text(report.text(GOOD), encoding="utf-8")
    done = command(commands.verify_report, tmp_path / "report.json", "--key", tmp_path / "acme.pub")
    assert done.exit_code == 2
    assert "--signature and --key: expected both or none" in " ".join(done.output.replace("│", " ").split())
