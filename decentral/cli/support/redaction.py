"""Taking out of a text what is nobody else's business: keys, tokens, invites, addresses, names of people. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

_INVITE = re.compile(r"decentral1:[A-Za-z0-9_-]+")
_NAMED = re.compile(r"/(dns|dns4|dns6|dnsaddr)/[^/\s\"',]+")
_IP4, _IP6 = r"\d{1,3}(?:\.\d{1,3}){3}", r"[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:%\w+)?"
_ADDRESS = re.compile(rf"(?<![\w.:])(?:{_IP4}|{_IP6})(?![\w.])")


class Redaction:
    """Replaces the same address by the same word everywhere, so that who reads it can still tell two apart."""

    def __init__(self, secrets: Iterable[str], home: str) -> None:
        self._secrets = sorted((one for one in secrets if one), key=len, reverse=True)
        self._home = re.compile(re.escape(home) + r"(?![\w.-])") if len(home) > 1 else None
        self._hosts: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        """The text without them."""
        for secret in self._secrets:
            text = text.replace(secret, "[secret]")
        text = _INVITE.sub("decentral1:[invite]", text)
        if self._home is not None:
            text = self._home.sub("~", text)
        text = _NAMED.sub(lambda found: f"/{found[1]}/{self._host(found[0])}", text)
        return _ADDRESS.sub(lambda found: self._address(found[0]), text)

    def _address(self, text: str) -> str:
        try:
            found = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return text  # a version, a time of day, a digest
        if found.is_loopback or found.is_unspecified:
            return text
        return self._host(text)

    def _host(self, text: str) -> str:
        return self._hosts.setdefault(text, f"host{len(self._hosts) + 1}")
