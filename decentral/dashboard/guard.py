"""Who may look: an ASGI layer in front of everything that the page serves.

Read-only: GET and HEAD. On this machine alone only names of this machine are answered, or a site that a browser has
open could rebind its own name to 127.0.0.1 and read along. Where others can reach it, a token is asked for instead: in
the address once, then in a cookie that no script reads. Every answer carries headers that keep foreign code out.
"""

from __future__ import annotations

import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
_HERE = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to listen at."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Lets through what may look at ``inner``; ``token``: None where this machine alone can ask."""

    def __init__(self, inner: ASGIApp, *, token: str | None, port: int) -> None:
        self._inner, self._token = inner, token
        self._cookie = f"decentral_{port}"  # cookies know no ports: two pages of one machine have one each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._inner(scope, receive, send)
            return
        answer = self._verdict(scope) or self._inner

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await answer(scope, receive, send_with_headers)

    def _verdict(self, scope: Scope) -> Response | None:
        """An answer of our own; None: go on."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page only shows\n", 405, {"allow": "GET, HEAD"})
        if self._token is None:
            return None if _host(headers) in _HERE else PlainTextResponse("ask for it by localhost\n", 421)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        if given and self._is_token(given[0]):
            redirect = RedirectResponse(scope["path"], 303)
            redirect.set_cookie(self._cookie, given[0], httponly=True, samesite="strict")
            return redirect
        if self._is_token(self._shown(headers)):
            return None
        return PlainTextResponse("open the address with ?token=..., as decentral dashboard printed it\n", 401)

    def _shown(self, headers: Headers) -> str:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return bearer.strip()
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""

    def _is_token(self, given: str) -> bool:
        """In constant time, whatever was given."""
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _host(headers: Headers) -> str:
    """The name that was asked for, without its port."""
    host = headers.get("host", "").lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
