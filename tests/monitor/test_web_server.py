import asyncio
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
import requests
from monitor.watched_run import new_run
from ranks import ROOT

from refocused.commands.main import run_command

MONITOR = [sys.executable, "-m", "refocused", "monitor"]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_screen_in_a_browser_needs_the_token_and_ends_with_its_server(tmp_path, end):
    pytest.importorskip("textual_serve")
    new_run(tmp_path / "runs").begin(run="one")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*MONITOR, "one", "--web", str(port)]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as server:
        try:
            _check(server, port, end)
        finally:
            server.kill()


def _check(server, port, end):
    assert server.stdout is not None
    base, address = f"http://127.0.0.1:{port}", server.stdout.readline().decode().split()[0]
    [listening] = psutil.Process(server.pid).net_connections()
    assert (listening.laddr.ip, listening.laddr.port) == ("127.0.0.1", port)
    page = requests.get(address)
    assert page.status_code == 200 and f'{address.replace("http", "ws")}ws"' in page.text
    # The page loads nothing from elsewhere, and passes its address to no other site.
    assert "googleapis" not in page.text and 'css/xterm.css"' in page.text
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self' data: 'uns")
    assert page.headers["Referrer-Policy"] == "no-referrer"
    for url, headers in (
        (base, {}),
        (address[:-2] + "/", {}),
        (f"{base}/static/js/textual.js", {}),
        (address, {"Host": f"rebound.example:{port}"}),
        (address, {"Origin": "http://evil.example"}),
    ):
        assert requests.get(url, headers=headers).status_code == 403, (url, headers)
    asyncio.run(_use(server, base, address, end))


async def _use(server, base, address, end):
    """Use the websocket as the page does, and end the server while it is open."""
    import aiohttp

    async with aiohttp.ClientSession() as session:
        for url, origin in ((f"{base}/ws", base), (f"{address}ws", "http://evil.example")):
            with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                await session.ws_connect(url, origin=origin)
        window = await session.ws_connect(f"{address}ws?width=120&height=40", origin=base)
        seen = ""
        for words, key in (("TRAINING", "?"), ("Escape goes back", "")):
            while words not in seen:
                data = (await window.receive()).data
                seen += data.decode() if isinstance(data, bytes) else ""
            await window.send_json(["stdin", key])
        children = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(end)
        async for _ in window:  # until the server closes it
            pass
        assert await asyncio.to_thread(server.wait) == (0 if end is signal.SIGINT else -end)
        assert children and not psutil.wait_procs(children, timeout=30)[1]


def test_a_port_in_use_is_named_and_no_address_is_printed(tmp_path, capsys):
    pytest.importorskip("textual_serve")
    run = new_run(tmp_path)
    run.begin()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run_command("monitor", [str(run.folder), "--web", port]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and f"Port {port} cannot be used" in printed.err


def test_without_the_package_its_installation_is_named(tmp_path, monkeypatch, capsys):
    run = new_run(tmp_path)
    run.begin()
    for module in ("textual_serve.server", "refocused.monitor.screen.web_server"):
        monkeypatch.setitem(sys.modules, module, None)
    assert run_command("monitor", [str(run.folder), "--web"]) == 2
    fix = f"{sys.executable} -m pip install textual-serve"
    assert capsys.readouterr().err == f"error: --web needs textual-serve. Install it: {fix}\n"
