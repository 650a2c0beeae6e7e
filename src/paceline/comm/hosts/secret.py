"""Who may take part: those who have the run's token.

The token gives two keys. With encryption, members authenticate each other by CURVE keys. Without
it, which is for this host and for trusted networks, a member shows a password that is made of the
token. Either way a connection of anyone else is refused before it can say anything.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

import zmq
from zmq.utils import z85

TOKEN_BYTES = 32
ZAP_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN, _USER = b"paceline", b"member"


def new_token() -> bytes:
    """A token for a run."""
    return secrets.token_bytes(TOKEN_BYTES)


class Secret:
    """What the members of a run know, and nobody else.

    Args:
        token: of the run.
        encrypted: whether connections are encrypted.
    """

    def __init__(self, token: bytes, encrypted: bool) -> None:
        self._encrypted = encrypted
        self._password = hashlib.blake2b(token, person=b"pl-password").hexdigest().encode()
        if encrypted:
            self._key = z85.encode(
                hashlib.blake2b(token, digest_size=32, person=b"pl-key").digest()
            )
            self._public = zmq.curve_public(self._key)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket that listens admit members only."""
        socket.zap_domain = _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self._encrypted:
            socket.curve_server = True
            socket.curve_secretkey, socket.curve_publickey = self._key, self._public
        else:
            socket.plain_server = True

    def show(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket that connects show that it is a member's."""
        if self._encrypted:
            socket.curve_serverkey = socket.curve_publickey = self._public
            socket.curve_secretkey = self._key
        else:
            socket.plain_username, socket.plain_password = _USER, self._password

    def answer(self, zap: zmq.Socket[bytes]) -> None:
        """Admit a connection, or refuse it; ``zap`` is where ZeroMQ asks for that."""
        version, number, domain, _address, _identity, mechanism, *credentials = zap.recv_multipart()
        admitted = domain == _DOMAIN and self._admits(mechanism, credentials)
        status, text = (b"200", b"") if admitted else (b"400", b"no member of this run")
        zap.send_multipart([version, number, status, text, b"", b""])

    def _admits(self, mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        if self._encrypted:
            return mechanism == b"CURVE" and _equal(credentials, [z85.decode(self._public)])
        return mechanism == b"PLAIN" and _equal(credentials, [_USER, self._password])


def _equal(shown: Sequence[bytes], right: Sequence[bytes]) -> bool:
    return hmac.compare_digest(b"\0".join(shown), b"\0".join(right))
