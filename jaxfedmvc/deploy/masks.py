"""Masks of secure sums with real keys, in place of those that a simulation draws from one key.

    s_ij = HKDF(X25519(private_i, public_j), agreement, i, j)
    message_i + sum_{j > i} stream(s_ij, exchange) - sum_{j < i} stream(s_ij, exchange)  modulo 2^32

with the number of the exchange and a hash of all that was asked up to it: where a server asks one
client for something else than the others, the masks do not cancel.

A node's X25519 key is of one job and one plan. It is signed by the node's identity, an Ed25519 key
whose public half the operators gave each other beforehand: a server in the middle cannot put its
own key in its place. Streams are ChaCha20's.

A pair's stream hides one message of each of the two: an exchange has one set of participants, all
clients of the cohort, and a node answers one request under a number, always with the same bits.
There is no second attempt with fewer clients, and so no two sums of which one could be subtracted
from the other: a client that stays away stops the job until it is back.

The integers are those of `messages.secure`. Source: Bonawitz et al., CCS 2017, section 4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxfedmvc import checks, files
from jaxfedmvc.deploy.wire import Refused

_DOMAIN = b"jaxfedmvc secure sum 1"
_PUBLIC = "a line of an Ed25519 .pub file"


def read_identity(path: Path) -> Any:
    """Reads a node's private Ed25519 key, in OpenSSH's form.

    Raises:
      ValueError: It is none, has a password, or other users of the machine may read it.
      OSError: It cannot be read.
      ImportError: The package cryptography is not installed.
    """
    ed25519, serialization = _cryptography()
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"identity: {path} is no private key without a password") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ValueError(f"identity: {path} is no Ed25519 key")
    files.check_private(path, "identity")
    return key


def read_public(text: Any, client: int) -> Any:
    """Reads a line "ssh-ed25519 AAAA... comment".

    Raises:
      ValueError: It is none; names the client.
      ImportError: The package cryptography is not installed.
    """
    ed25519, serialization = _cryptography()
    try:
        key = serialization.load_ssh_public_key(str(text).encode())
    except Exception as error:  # of several kinds, for several kinds of nonsense
        raise checks.wrong(f"identities.{client}", text, _PUBLIC) from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise checks.wrong(f"identities.{client}", text, _PUBLIC)
    return key


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ImportError(
            "secure sums need the package cryptography: python -m pip install 'jaxfedmvc[flower]'"
        ) from error
    return ed25519, serialization


def _derived(material: bytes, info: bytes) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), 32, salt=_DOMAIN, info=info).derive(material)


class Party:
    """One node's part in the secure sums of a job."""

    def __init__(self, secret: bytes, client: int, agreement: str) -> None:
        """Derives the node's key of this job.

        Args:
          secret: 32 bytes of this node and this job alone, drawn when it joins: a job that is begun
            anew has other masks.
          client: Its number.
          agreement: Hash of the job and the plan.
        """
        from cryptography.hazmat.primitives.asymmetric import x25519

        self.client, self.agreement = client, agreement.encode()
        seed = _derived(secret, b"key " + self.agreement)
        self._private = x25519.X25519PrivateKey.from_private_bytes(seed)
        self.public: bytes = self._private.public_key().public_bytes_raw()
        self._shared: dict[int, bytes] = {}

    def _signed_text(self, client: int, public: bytes) -> bytes:
        return hashlib.sha256(
            b" ".join([_DOMAIN, self.agreement, str(client).encode(), public])
        ).digest()

    def offer(self, identity: Any) -> dict[str, str]:
        """Returns the public key, signed by the node's identity; goes through JSON."""
        signature = identity.sign(self._signed_text(self.client, self.public))
        return {"public": self.public.hex(), "signature": signature.hex()}

    def agree(self, offers: Mapping[int, Any], identities: Mapping[int, Any]) -> None:
        """Agrees on a secret with every other client of the cohort.

        Args:
          offers: Of all clients of the cohort.
          identities: Public keys that the operators exchanged.

        Raises:
          Refused: A client's key is missing, unreadable or not signed by its identity; then nothing
            is agreed on with anybody.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import x25519

        agreed: dict[int, bytes] = {}
        for other, offer in offers.items():
            if other == self.client:
                continue
            if other not in identities:
                raise Refused("keys", f"client {other}: this node knows no identity of it")
            try:
                public = bytes.fromhex(offer["public"])
                signature = bytes.fromhex(offer["signature"])
                identities[other].verify(signature, self._signed_text(other, public))
                shared = self._private.exchange(x25519.X25519PublicKey.from_public_bytes(public))
            except (InvalidSignature, KeyError, TypeError, ValueError) as error:
                raise Refused(
                    "keys", f"client {other}: its key is not signed by its identity"
                ) from error
            pair = b"%d %d" % (min(self.client, other), max(self.client, other))
            agreed[other] = _derived(shared, pair + b" " + self.agreement)
        self._shared = agreed

    def masked(self, body: bytes, exchange: int, asked: str) -> bytes:
        """Adds this client's masks to a message of 32-bit integers.

        Args:
          body: The message's leaves, of `wire.encode`.
          exchange: Its number, used once.
          asked: Hash of what the clients of the cohort were asked, so far and now: theirs alike.

        Raises:
          Refused: Keys are not agreed on.
        """
        if not self._shared:
            raise Refused("keys", "keys: not agreed on")
        total = np.frombuffer(body, "<u4").copy()
        for other, shared in sorted(self._shared.items()):
            stream = _stream(_derived(shared, f"exchange {exchange} {asked}".encode()), len(body))
            total = total + stream if other > self.client else total - stream
        return total.tobytes()


def _stream(key: bytes, size: int) -> np.ndarray:
    """Returns ChaCha20's first bytes as 32-bit integers; the key is used for nothing else."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    drawn = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))
    return np.frombuffer(drawn, "<u4")
