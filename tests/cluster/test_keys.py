"""One key file: written for its owner alone, and read only if it is whole and still his alone."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from dtorch.cli import main
from dtorch.cluster.keys import Keys, default_path
from dtorch.core.errors import UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "key"


def test_what_is_written_is_read(path: Path) -> None:
    keys = Keys.generate()
    assert keys.write(path) == path and Keys.read(path) == keys
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o077 == 0
    assert keys.line.member_secret == keys.member_secret.encode() and keys.lock.secret == keys.hub_secret.encode()


def test_every_key_is_another() -> None:
    one, other = Keys.generate(), Keys.generate()
    assert [field for field in one.__struct_fields__ if getattr(one, field) == getattr(other, field)] == ["format"]


def test_the_file_is_private_from_its_creation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*args: object) -> int:
        assert args[2] == 0o600
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", create)
    with pytest.raises(UsageError, match="No space left"):
        Keys.generate().write(path)


def test_an_open_mask_opens_nothing(path: Path) -> None:
    before = os.umask(0)
    try:
        Keys.generate().write(path)
    finally:
        os.umask(before)
    Keys.read(path)


def test_nothing_is_left_of_a_key_that_could_not_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgspec.json, "format", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Keys.generate().write(path)
    assert not path.exists()


def test_a_key_is_not_overwritten(path: Path) -> None:
    keys = Keys.generate()
    keys.write(path)
    with pytest.raises(UsageError, match="not overwritten"):
        Keys.generate().write(path)
    assert Keys.read(path) == keys


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644, 0o777])
def test_a_key_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    Keys.generate().write(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:o}") as caught:
        Keys.read(path)
    assert "chmod 600" in str(caught.value)


def test_a_key_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Keys.generate().write(path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(UsageError, match="of user"):
        Keys.read(path)


def _without(field: str) -> Callable[[dict[str, str]], object]:
    return lambda parts: {name: part for name, part in parts.items() if name != field}


def _with(field: str, part: object) -> Callable[[dict[str, str]], object]:
    return lambda parts: {**parts, field: part}


def _locked(secret: str) -> str:
    """A private key behind a password."""
    key = serialization.load_pem_private_key(secret.encode(), None)
    kind = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.BestAvailableEncryption(b"x")).decode()


def _of_another_curve(certificate: str) -> str:
    """A certificate that names a curve which there is not: a single byte is damaged."""
    named, other = (bytes.fromhex(f"06082a8648ce3d0301{last}") for last in ("07", "7f"))
    der = x509.load_pem_x509_certificate(certificate.encode()).public_bytes(serialization.Encoding.DER)
    assert named in der
    return ssl.DER_cert_to_PEM_cert(der.replace(named, other))


@pytest.mark.parametrize(
    "change",
    [
        *(_without(field) for field in Keys.__struct_fields__),
        *(_with(field, "x") for field in Keys.__struct_fields__),
        *(_with(field, 1) for field in Keys.__struct_fields__),
        _with("format", "dtorch-key-2"),
        _with("more", "x"),
        _with("hub_secret", zmq.curve_keypair()[1].decode()),
        _with("hub_secret", "é" * 40),
        _with("hub_secret", "~" * 40),
        lambda parts: {**parts, "certificate_secret": _locked(parts["certificate_secret"])},
        lambda parts: {**parts, "certificate": _of_another_curve(parts["certificate"])},
        _with("certificate", Keys.generate().certificate),
        lambda parts: [],
        lambda parts: None,
    ],
)
def test_what_is_no_whole_key_is_refused(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    Keys.generate().write(path)
    parts = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(change(parts)))
    with pytest.raises(UsageError, match="holds no whole key") as caught:
        Keys.read(path)
    assert parts["hub_secret"] not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"{", b"[" * 100_000, b"\xff" * 100_000], ids=repr)
def test_what_is_no_key_at_all_is_refused(path: Path, content: bytes) -> None:
    Keys.generate().write(path)
    path.write_bytes(content[:])
    with pytest.raises(UsageError, match="holds no whole key"):
        Keys.read(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for place, why in ((tmp_path, "no file"), (pipe, "no file"), (tmp_path / "none", "No such file")):
        with pytest.raises(UsageError, match=why):
            Keys.read(place)


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DTORCH_KEY", raising=False)
    assert default_path() == tmp_path / ".dtorch" / "key"
    with pytest.raises(UsageError, match="dtorch keygen"):
        Keys.read()
    monkeypatch.setenv("DTORCH_KEY", str(tmp_path / "mine"))
    keys = Keys.generate()
    assert keys.write() == tmp_path / "mine" and Keys.read() == keys


def test_secrets_are_not_printed() -> None:
    keys = Keys.generate()
    shown = f"{keys!r} {keys}"
    assert keys.hub_public in shown
    assert not any(secret in shown for secret in (keys.hub_secret, keys.member_secret, keys.certificate_secret))


def test_the_command(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["keygen", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    keys = Keys.read(path)
    monkeypatch.setenv("DTORCH_KEY", str(path))
    assert main(["keygen"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "to do:" in err and Keys.read() == keys


def test_a_key_travels_as_a_line() -> None:
    keys = Keys.generate()
    line = keys.as_line()
    assert line.count(b"\n") == 1 and Keys.from_line(line) == keys
    for wrong in (b"", b"\n", line[:100], b"{}\n"):
        with pytest.raises(UsageError, match="the first line of the standard input, which holds no whole key") as caught:
            Keys.from_line(wrong)
        assert keys.member_secret not in str(caught.value)
