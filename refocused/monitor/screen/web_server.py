"""The live screen in a browser: textual-serve on the loopback device, behind a token."""

import functools
import hmac
import re
import secrets
from typing import Any

from aiohttp import web
from textual_serve.server import Server

HOST = "127.0.0.1"
_LINK_ELSEWHERE = re.compile(r"<link[^>]*https://[^>]*>")
END_SECONDS = 0.1  # after which open windows are closed, and their apps ended


class MonitorServer(Server):  # type: ignore[misc] # an optional extra, which mypy does not read
    """Serves a command that shows a Textual app; each browser window runs one of its own.

    The first part of every path is a random token, without which all requests are refused: other
    users of the machine can reach a loopback port too. So are requests under another host name or
    of another page, with which a web site could reach the port through its visitor's browser.
    """

    def __init__(self, command: str, *, port: int) -> None:
        """Listen on a port of the loopback device once `serve` is called."""
        super().__init__(command, host=HOST, port=port, title="refocused monitor")
        self._token = secrets.token_urlsafe()

    def serve(self, debug: bool = False) -> None:
        """Serve until Ctrl+C; print the address once the port listens, and log none of its uses.

        Raises:
            OSError: The port cannot be used; another program that has it must not get the token.
        """
        self.debug = debug
        address = f"{self.public_url}/{self._token}/  (Ctrl+C ends it)"
        web.run_app(
            self._make_app(),
            host=HOST,
            port=self.port,
            access_log=None,
            print=lambda _: print(address, flush=True),
            shutdown_timeout=END_SECONDS,
        )

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing yet."""

    async def _make_app(self) -> web.Application:
        guard = web.middleware(functools.partial(self._refuse_strangers))
        app = web.Application(middlewares=[guard])
        app.on_response_prepare.append(self._load_nothing_else)
        app.add_subapp(f"/{self._token}", await super()._make_app())
        return app

    async def _refuse_strangers(self, request: web.Request, handler: Any) -> web.StreamResponse:
        origin = request.headers.get("Origin", self.public_url)
        is_ours = {f"http://{request.host}", origin} == {self.public_url}
        token = request.path[1:].partition("/")[0].encode()
        if not hmac.compare_digest(token, self._token.encode()) or not is_ours:
            raise web.HTTPForbidden(text="Open the address that the monitor printed.")
        answer: web.StreamResponse = await handler(request)
        if isinstance(answer, web.Response) and answer.content_type == "text/html":
            answer.text = _LINK_ELSEWHERE.sub("", answer.text or "")  # a font, needless offline
        return answer

    async def _load_nothing_else(self, request: web.Request, answer: web.StreamResponse) -> None:
        """Let the page load only this server's files."""
        answer.headers["Content-Security-Policy"] = (
            "default-src 'self' data: 'unsafe-inline'; "
            f"connect-src 'self' ws://{request.host}; frame-ancestors 'none'"
        )
        answer.headers["Referrer-Policy"] = "no-referrer"
