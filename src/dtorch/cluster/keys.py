"""The key of a cluster: one file that lets in. Who has it may join and drive; who has not can do nothing.

There is one form of it and no lesser one for workers. Workers run functions that clients send, under the same user, and both
ends of the health service present the same certificate: a worker's form would protect nobody, and would have to be handled.
"""

from __future__ import annotations

import datetime
import os
import stat
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from ..core.errors import UsageError, four_parts
from ..transport.wire import Key, Lock

PRIVATE = 0o600
LARGEST_NBYTES = 64 * 1024
"""No key file is longer."""

CERTIFIED_NAME = "dtorch"
"""What the certificate certifies. Members ask for this name at whatever address, for they trust this certificate only."""

VALID_DAYS = 100 * 365
SKEW = datetime.timedelta(days=2)
"""How much later than the machine that makes a key another may think that it is."""


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that members of a cluster need to trust each other, as text.

    Attributes:
        format: says that this is a key, and of which form.
        hub_public: CurveZMQ key of the side that listens, in Z85, and so on.
        certificate: what both ends of the health service present and trust, as PEM.
        certificate_secret: its private key, as PEM.
    """

    format: Literal["dtorch-key-1"]
    hub_public: str
    hub_secret: str
    member_public: str
    member_secret: str
    certificate: str
    certificate_secret: str

    @classmethod
    def generate(cls) -> Keys:
        """New keys, that no one else has."""
        pairs = [part.decode() for _ in range(2) for part in zmq.curve_keypair()]
        certificate, secret = _certificate()
        return cls(
            format="dtorch-key-1",
            hub_public=pairs[0],
            hub_secret=pairs[1],
            member_public=pairs[2],
            member_secret=pairs[3],
            certificate=certificate,
            certificate_secret=secret,
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str] | None = None) -> Keys:
        """The keys of a file.

        Args:
            path: where it is; as ``default_path`` says when omitted.

        Raises:
            UsageError: there is none, others may read it or own it, or it is no key file.
        """
        place = default_path() if path is None else Path(path)
        return cls._decoded(_read_private(place), f"the file {str(place)!r}")

    @classmethod
    def from_line(cls, line: bytes) -> Keys:
        """The keys that ``as_line`` has written.

        Raises:
            UsageError: there are none.
        """
        return cls._decoded(line, "the first line of the standard input")

    def as_line(self) -> bytes:
        """All of it as one line of text, for a pipe to somebody who is to have it."""
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def _decoded(cls, text: bytes, of: str) -> Keys:
        try:
            keys = msgspec.json.decode(text, type=cls)
            _check(keys)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            # What was wrong is told without the text, which may be secret.
            given, rule = (
                f"{of}, which holds no whole key",
                "a key is what dtorch keygen writes",
            )
            raise UsageError(four_parts(given, rule, "reading the key", "copy it again, or make one: dtorch keygen")) from error
        return keys

    def write(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write them to a new file, which its owner alone may read; returns where.

        Raises:
            UsageError: there is a file already, or none can be made.
        """
        place = default_path() if path is None else Path(path)
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
        except FileExistsError as error:
            given, rule = f"the path {str(place)!r}, where there is a file", "a key is not overwritten: members may still use it"
            raise UsageError(four_parts(given, rule, "writing the key", "give another path, or delete that file")) from error
        except OSError as error:
            raise _unusable(place, error) from error
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        except BaseException:
            place.unlink()
            raise
        return place

    @property
    def line(self) -> Key:
        """What a member of the control plane needs."""
        return Key(self.hub_public.encode(), self.member_public.encode(), self.member_secret.encode())

    @property
    def lock(self) -> Lock:
        """What the listening side of the control plane needs."""
        return Lock(self.line, self.hub_secret.encode())

    def __repr__(self) -> str:
        # Secrets stay out of logs and tracebacks.
        return f"Keys(hub_public={self.hub_public!r})"


def default_path() -> Path:
    """Where the key is looked for: what ``DTORCH_KEY`` says, else ``~/.dtorch/key``."""
    return Path(os.environ.get("DTORCH_KEY") or Path.home() / ".dtorch" / "key")


def _read_private(place: Path) -> bytes:
    try:
        # Not to wait where someone has put a pipe.
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unusable(place, error) from error
    try:
        _check_private(place, os.fstat(fd))
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(LARGEST_NBYTES)
    finally:
        os.close(fd)


def _check_private(place: Path, state: os.stat_result) -> None:
    where, mode = "reading the key", stat.S_IMODE(state.st_mode)
    if not stat.S_ISREG(state.st_mode):
        given, rule = f"the path {str(place)!r}, which is no file", "a key is an ordinary file"
        raise UsageError(four_parts(given, rule, where, "give the path that dtorch keygen told"))
    if state.st_uid != os.geteuid():
        given, rule = f"the key file {str(place)!r} of user {state.st_uid}", f"a key is of who uses it, user {os.geteuid()}"
        raise UsageError(four_parts(given, rule, where, "make a copy of your own, which nobody else may read"))
    if mode & 0o077:
        given, rule = f"the key file {str(place)!r} with mode {mode:o}", "only its owner may read or write a key"
        raise UsageError(four_parts(given, rule, where, f"chmod 600 {place}; if others may have read it, make a new one"))


def _unusable(place: Path, error: OSError) -> UsageError:
    given, rule = f"the path {str(place)!r}: {error.strerror}", "a cluster is entered with a key, from a file"
    remedy = "make one with dtorch keygen, or say in DTORCH_KEY or in your call where it is"
    return UsageError(four_parts(given, rule, "the key file", remedy))


def _check(keys: Keys) -> None:
    """Whether all parts belong together.

    Raises:
        ValueError: they do not.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    for public, secret in ((keys.hub_public, keys.hub_secret), (keys.member_public, keys.member_secret)):
        if len(secret) != 40 or _public(secret) != public.encode():
            raise ValueError("a pair of keys does not match")
    try:
        certificate = x509.load_pem_x509_certificate(keys.certificate.encode())
        secret_key = load_pem_private_key(keys.certificate_secret.encode(), password=None)
        belongs = certificate.public_key() == secret_key.public_key()
    except (UnsupportedAlgorithm, x509.InvalidVersion, TypeError) as error:
        raise ValueError("the certificate or its key is of another kind") from error
    if not belongs:
        raise ValueError("the certificate is of another key")


def _public(secret: str) -> bytes:
    try:
        return zmq.curve_public(secret.encode())
    except zmq.ZMQError as error:
        raise ValueError("a key is not in Z85") from error


def _certificate() -> tuple[str, str]:
    """A certificate that vouches for itself, and its private key."""
    # Only who makes or reads a key file needs it: an embedded session does not.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, CERTIFIED_NAME)])
    begins = datetime.datetime.now(datetime.UTC) - SKEW
    usages = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFIED_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .sign(secret, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = secret.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem).decode(), private.decode()
