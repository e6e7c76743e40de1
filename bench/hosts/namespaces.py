"""Makes hosts out of Linux namespaces of this machine, which are joined by a switch.

    with hosts(2) as (first, second):
        subprocess.run(first.command("ping", "-c1", second.address), check=True)

Each host has its own network, /dev/shm, process table, host name and folder for Ray. The hosts share all other files.
As on many machines, a host's own name stands for a loopback address, so other hosts do not find a server at the address
of its name. All processes of a host are in one process namespace, so they end with the host, and the hosts end with the
process that has made them.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

TIMEOUT_S = 30.0
_TOOLS = ("unshare", "nsenter", "ip", "tc", "mount")
_HOST_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
_FIRST = "\ntrap '' CHLD; echo ready; exec cat"
"""End of the script of a first process. It ignores the end of children, so that none remains as a zombie, and it ends
when its standard input is closed."""
_SWITCH = "ip link add br0 type bridge && ip link set br0 up || exit 1"
_HOST = r"""
set -e
hostname "$0"
mount -t tmpfs -o size="$1"m tmpfs /dev/shm
mkdir -p "$2"
mount -t tmpfs -o size=1g tmpfs "$2"
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$0" > "$2"/hosts
mount --bind "$2"/hosts /etc/hosts
echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true
ip link set lo up
"""
_NETWORK = """
set -e
ip addr add "$0"/24 dev eth0
ip addr add "$1"/64 dev eth0 nodad || true
ip link set eth0 up
ip route add default dev eth0
ip -6 route add default dev eth0 || true
"""


def why_no_hosts() -> str:
    """Return why this process cannot make hosts, such as "needs root to make namespaces"; "" if it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    namespaces = ["unshare", *_HOST_NAMESPACES, "--fork", "true"]
    if os.getuid() or subprocess.run(namespaces, capture_output=True, timeout=TIMEOUT_S, check=False).returncode:
        return "needs root to make namespaces"
    return ""


class _FirstProcess:
    """The first process of new namespaces. All that run in them end with it."""

    def __init__(self, namespaces: Sequence[str], script: str, *arguments: str) -> None:
        command = ["unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", script + _FIRST, *arguments]
        self._outer = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C does not end the host before what runs on it.
        )
        try:
            assert self._outer.stdout is not None
            if self._outer.stdout.readline() != "ready\n":
                raise RuntimeError(f"namespaces with {', '.join(namespaces)} were not made")
            [first] = psutil.Process(self._outer.pid).children()
            self.pid = first.pid
            """Id of the process outside of the namespaces."""
            self._ended = os.pidfd_open(self.pid)
            """Descriptor that becomes readable when all processes of the namespaces have ended."""
        except BaseException:
            self._kill()
            raise

    def end(self) -> None:
        """Kill all processes of the namespaces, and wait until they are gone. Idempotent."""
        self._kill()
        if self._ended >= 0:
            poll = select.poll()  # `select` refuses descriptors above 1023.
            poll.register(self._ended, select.POLLIN)
            poll.poll(TIMEOUT_S * 1000)
            os.close(self._ended)
            self._ended = -1

    def _kill(self) -> None:
        with self._outer:
            self._outer.kill()


class Host:
    """A host, whose processes run in its namespaces."""

    def __init__(self, number: int, name: str, shm_mib: int, switch: int) -> None:
        """Start the host. number: number from 1 on, by which its addresses end. switch: pid of the switch."""
        self.name = name
        self.address = f"10.77.0.{number}"
        """IP address at which the other hosts reach it."""
        self.address6 = f"fd00:77::{number:x}"
        """IP address of version 6 at which the other hosts reach it."""
        self._number = number
        self._shm_mib = shm_mib
        self._switch = switch
        self._mbit: int | None = None
        self._first = self._start()

    @property
    def pid(self) -> int:
        """Id of the host's first process, outside of its namespaces."""
        return self._first.pid

    def command(self, *arguments: str, folder: str = "/") -> list[str]:
        """Return the command that runs `arguments` on this host in `folder`. Killing it from outside does not end its
        child, which ends with the host."""
        return ["nsenter", f"--target={self.pid}", *_HOST_NAMESPACES, f"--wdns={folder}", "--", *arguments]

    def cut(self) -> None:
        """Separate the host from all others. Its connections stay open, as if a cable was pulled."""
        self._at_switch("ip", "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Join the host with the others again after a `cut`."""
        self._at_switch("ip", "link", "set", self._port, "master", "br0")

    def shape(self, mbit: int | None) -> None:
        """Limit the host's link to `mbit` Mbit/s in each direction; None removes the limit."""
        self._mbit = mbit
        verb = "replace" if mbit else "del"
        limits: tuple[str, ...] = ()
        if mbit:
            burst = max(256 << 10, mbit * 25)  # These are the bytes of 0.2 ms, or a few packets of 64 KiB.
            limits = ("tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "20ms")
        for run, device in ((self._at_switch, self._port), (self._at_host, "eth0")):
            run("tc", "qdisc", verb, "dev", device, "root", *limits)

    @property
    def received_bytes(self) -> int:
        """Number of bytes that the host has received over its link, as its network interface counts them."""
        found = subprocess.run(
            self.command("cat", "/proc/net/dev"), check=True, timeout=TIMEOUT_S, capture_output=True, text=True
        )
        [line] = [line for line in found.stdout.splitlines() if line.strip().startswith("eth0:")]
        return int(line.partition(":")[2].split()[0])

    def kill(self) -> None:
        """Kill all processes of the host. Its peers see their connections end; after a `cut`, they see nothing, as when
        a host loses power."""
        self._first.end()

    def restart(self) -> None:
        """Kill the host, and start it again without processes and with an empty /dev/shm. Its name, addresses and limit
        stay the same."""
        self.kill()
        self._first = self._start()
        if self._mbit:
            self.shape(self._mbit)

    @property
    def _port(self) -> str:
        return f"port{self._number}"

    def _start(self) -> _FirstProcess:
        ray_folder = str(Path(tempfile.gettempdir()) / "ray")
        namespaces = (*_HOST_NAMESPACES, "--mount-proc")
        first = _FirstProcess(namespaces, _HOST, self.name, str(self._shm_mib), ray_folder)
        try:
            enter = ("nsenter", f"--target={first.pid}", "--net", "--")
            # With the same hardware address after a restart, the others find the host at once.
            link = ("ip", "link", "add", "eth0", "address", f"02:00:00:00:77:{self._number:02x}", "type", "veth")
            self._at_switch("sh", "-c", f"ip link del {self._port} 2>/dev/null || true")  # that of a killed host
            _run(*enter, *link, "peer", "name", self._port, "netns", str(self._switch))
            _run(*enter, "sh", "-c", _NETWORK, self.address, self.address6)
            self._at_switch("ip", "link", "set", self._port, "master", "br0", "up")
        except BaseException:
            first.end()
            raise
        return first

    def _at_switch(self, *command: str) -> None:
        _run("nsenter", f"--target={self._switch}", "--net", "--", *command)

    def _at_host(self, *command: str) -> None:
        _run(*self.command(*command))


@contextmanager
def hosts(count: int, *, shm_mib: int = 512, name: str = "") -> Iterator[tuple[Host, ...]]:
    """Context manager that makes hosts, each with `shm_mib` MiB of /dev/shm. Its value is the hosts. At its end, all of
    their processes are gone. name: name of all hosts; "" for `host1`, `host2`, ...."""
    with ExitStack() as stack:
        switch = _FirstProcess(("--net",), _SWITCH)
        stack.callback(switch.end)
        made = []
        for number in range(1, count + 1):
            made.append(Host(number, name or f"host{number}", shm_mib, switch.pid))
            stack.callback(made[-1].kill)
        yield tuple(made)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True)
