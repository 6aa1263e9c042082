"""Learn that this machine will be taken away: from its cloud's metadata server, or from a file."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable
from pathlib import Path

from refocused.system.strict_json import parse_json_object

DMI = Path("/sys/class/dmi/id")  # what the firmware says about the machine
ADDRESS = "169.254.169.254"  # of the metadata server of all three clouds
POLL_SECONDS = 5.0  # the shortest notice is 30 s
SILENT_POLL_SECONDS = 60.0  # while the server does not answer
TIMEOUT_SECONDS = 5.0
# The firmware's file, and how its content begins on the machines of each cloud.
FIRMWARE = {
    "gce": ("product_name", "Google Compute Engine"),
    "aws": ("sys_vendor", "Amazon EC2"),
    "azure": ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"),
}
GCE_ENDS = "TERMINATE_ON_HOST_MAINTENANCE"  # otherwise the machine is moved, and runs on
AZURE_ENDS = {"Preempt", "Terminate", "Reboot", "Redeploy"}  # `Freeze` is a pause of seconds


def cloud_of(dmi: Path = DMI) -> str | None:
    """Return this machine's cloud, without asking any server; None: another one, or none."""
    for cloud, (name, begin) in FIRMWARE.items():
        with contextlib.suppress(OSError):
            if (dmi / name).read_text(errors="replace").startswith(begin):
                return cloud
    return None


class MetadataServer:
    """One cloud's metadata server; proxies of the environment are not used."""

    def __init__(self, cloud: str, address: str = ADDRESS) -> None:
        """Prepare to ask the server at `address`, a host or `host:port`."""
        # Why this machine will be taken away; None: it stays. Raises OSError, HTTPException of
        # http.client, or ValueError if the server gives no usable answer.
        self.notice = {"gce": self._gce, "aws": self._aws, "azure": self._azure}[cloud]
        self._address = address
        self._token = self._name = ""

    def _get(self, path: str, headers: dict[str, str], method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace").strip()

    def _gce(self) -> str | None:
        begin, headers = "/computeMetadata/v1/instance/", {"Metadata-Flavor": "Google"}
        if self._get(f"{begin}preempted", headers) == (200, "TRUE"):
            return "GCE preempts this machine"
        ends = self._get(f"{begin}maintenance-event", headers) == (200, GCE_ENDS)
        return "GCE stops this machine for maintenance" if ends else None

    def _aws(self) -> str | None:
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            status, token = self._get("/latest/api/token", lifetime, "PUT")
            self._token = token if status == 200 else ""
        headers = {"X-aws-ec2-metadata-token": self._token}
        status, text = self._get("/latest/meta-data/spot/instance-action", headers)
        if status == 401:
            self._token = ""  # expired
        if status != 200:  # 404: no notice
            return None
        action = parse_json_object(text)
        return f"AWS will {action.get('action')} this machine at {action.get('time')}"

    def _azure(self) -> str | None:
        headers = {"Metadata": "true"}
        if not self._name:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            status, name = self._get(path, headers)
            self._name = name if status == 200 else ""
        status, text = self._get("/metadata/scheduledevents?api-version=2020-07-01", headers)
        events = parse_json_object(text)["Events"] if status == 200 else ()
        for event in events:  # of all machines of a group
            if event["EventType"] in AZURE_ENDS and self._name in event["Resources"]:
                begins = event.get("NotBefore") or "now"
                return f"Azure: {event['EventType']} of {self._name}, {begins}"
        return None


class SpotNotice:
    """Asks for a notice in a thread, until there is one.

    Attributes:
        text: Why this machine will be taken away; None: it stays.
    """

    def __init__(self, ask: Callable[[], str | None]) -> None:
        """Begin to ask; a source that cannot answer is asked less often, in silence."""
        self.text: str | None = None
        self._ask = ask
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _watch(self) -> None:
        pause = 0.0
        while self.text is None and not self._closed.wait(pause):
            pause = POLL_SECONDS
            try:
                self.text = self._ask()
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
                pause = SILENT_POLL_SECONDS


def watch_for_notice(source: str, *, dmi: Path = DMI, address: str = ADDRESS) -> SpotNotice | None:
    """Watch for a notice as `run.spot_notice` says; None: there is nobody to ask."""
    cloud = cloud_of(dmi) if source == "auto" else source
    if cloud is None or cloud == "none":
        return None
    if cloud in FIRMWARE:
        return SpotNotice(MetadataServer(cloud, address).notice)
    file = Path(cloud)
    return SpotNotice(lambda: f"{file} exists" if file.exists() else None)
