"""Signatures of reports: an in-toto statement about the file, in a DSSE envelope, by the package securesystemslib.

The report itself stays as it is; the envelope lies beside it, and any tool that knows these formats can check it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["SigningError", "complaint", "sign"]

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://github.com/linattn/linattn/conformance-report/v1"
PAYLOAD = "application/vnd.in-toto+json"


class SigningError(ValueError):
    """A key or an envelope cannot be used."""


@contextmanager
def needed() -> Iterator[None]:
    """Say how to get what signatures need, if it is not there."""
    try:
        yield
    except ImportError as error:
        raise SigningError(f"signatures need the package {error.name}: pip install 'securesystemslib[crypto]'") from None


def statement(report: Path, verdict: Mapping[str, Any]) -> bytes:
    """What is signed: which file, by its SHA-256, and the verdict in it."""
    told = {name: verdict[name] for name in ("outcome", "profile")}
    subject = {"name": report.name, "digest": {"sha256": hashlib.sha256(report.read_bytes()).hexdigest()}}
    made = {"_type": STATEMENT, "subject": [subject], "predicateType": PREDICATE, "predicate": told}
    return json.dumps(made, sort_keys=True).encode()


def sign(report: Path, verdict: Mapping[str, Any], key: Path) -> str:
    """The envelope of a report, as JSON.

    Args:
        report: Its file.
        verdict: The verdict in it.
        key: A private key in PEM, without a password: Ed25519, ECDSA or RSA.

    Raises:
        SigningError: The key cannot be read, or a package is missing.
    """
    with needed():
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from securesystemslib.dsse import Envelope
        from securesystemslib.signer import CryptoSigner
    try:
        signer = CryptoSigner(load_pem_private_key(key.read_bytes(), None))
    except (OSError, ValueError, TypeError) as error:
        raise SigningError(f"{key}: no private key in PEM that can be used: {error}") from None
    envelope = Envelope(statement(report, verdict), PAYLOAD, {})
    envelope.sign(signer)
    return json.dumps(envelope.to_dict(), indent=1) + "\n"


def complaint(report: Path, verdict: Mapping[str, Any], envelope: Path, key: Path) -> str:
    """Why a signature is not one of this report by this key; empty if it is.

    Args:
        report: The report's file.
        verdict: The verdict in it.
        envelope: The signature.
        key: A public key in PEM.

    Raises:
        SigningError: The key or the envelope cannot be read, or a package is missing.
    """
    with needed():
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
        from securesystemslib.dsse import Envelope
        from securesystemslib.exceptions import FormatError, VerificationError
        from securesystemslib.signer import SSlibKey
    try:
        public = SSlibKey.from_crypto(load_pem_public_key(key.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise SigningError(f"{key}: no public key in PEM that can be used: {error}") from None
    try:
        found = Envelope.from_dict(json.loads(envelope.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, FormatError) as error:
        raise SigningError(f"{envelope}: no DSSE envelope: {type(error).__name__}: {error}") from None
    try:
        found.verify([public], 1)
    except VerificationError:
        return f"{envelope.name} is not signed by {key.name}"
    if (found.payload_type, found.payload) != (PAYLOAD, statement(report, verdict)):
        return f"{envelope.name} is a signature of something else than {report.name}"
    return ""
