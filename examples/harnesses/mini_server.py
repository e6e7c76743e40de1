"""Runs mini-swe-agent, in the Python that has it. Each connection is one episode, in a process of its own.

    connect, {"folder": ..., "arguments": ["-t", "Fix it", ...], "environment": {...}} -> fork -> the command `mini`
    the connection ends when the process ends, and the process ends when the other side closes the connection

The command line of mini-swe-agent takes three seconds to import. A fork has imported it already.
"""

# pyright: reportMissingImports=false
import json
import os
import select
import signal
import socket
import sys
import threading

told = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # What the harness prints is also in its trajectory.
os.environ |= {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_CONFIGURED": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # It asks for nothing from the network.
}
import litellm  # noqa: E402
import minisweagent.agents.default  # noqa: E402, F401
import minisweagent.environments.local  # noqa: E402, F401
import minisweagent.models.litellm_textbased_model  # noqa: E402, F401
from minisweagent.run.mini import app  # noqa: E402


def play(connection: socket.socket) -> None:
    """Run the command `mini` in the folder of an episode."""
    job = json.loads(connection.makefile().readline())
    threading.Thread(target=lambda: connection.recv(1) or os._exit(1), daemon=True).start()
    os.chdir(job["folder"])
    os.environ |= job["environment"]
    app(job["arguments"], standalone_mode=False)


# The first call loads the rest of litellm.
litellm.completion("anthropic/policy", [{"role": "user", "content": "-"}], mock_response="-", api_key="-")
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel forgets processes that have ended.
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen(1024)
    os.write(told, b"ready\n")
    while sys.stdin not in select.select([sys.stdin, server], [], [])[0]:  # It ends with the process that started it.
        connection, _ = server.accept()
        if os.fork():
            connection.close()
            continue
        server.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            play(connection)
        finally:
            sys.stderr.flush()
            os._exit(0)
